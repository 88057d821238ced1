import pytest
import torch

from lightning_memopt.data import ByteTokenizer, DataError, TextDataModule, TokenWindows
from lightning_memopt.data.sources import in_validation


def module(paths, **kwargs):
    made = TextDataModule(paths=[str(path) for path in paths], **{"seq_len": 4, "batch_size": 2, **kwargs})
    made.setup("fit")
    return made


def test_windows_follow_on_and_targets_are_one_further():
    windows = TokenWindows(torch.arange(14, dtype=torch.uint8), seq_len=4)
    assert len(windows) == 3
    for index, window in enumerate(windows):
        assert window["input_ids"].tolist() == list(range(4 * index, 4 * index + 4))
        assert window["targets"].tolist() == list(range(4 * index + 1, 4 * index + 5))
        assert window["targets"].dtype == torch.int64


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_number_of_windows(tokens, count):
    assert len(TokenWindows(torch.zeros(tokens), seq_len=4)) == count


def test_bytes_there_and_back():
    tokenizer = ByteTokenizer()
    text = "naïve Ωmega 漢字 🙂\n"
    ids = tokenizer.encode(text)
    assert ids.dtype == torch.uint8
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[:3]) == "na\ufffd"


def test_documents_go_whole_to_one_side(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(chr(ord("0") + index) * 9)
    made = module([tmp_path], val_fraction=0.3)
    train, val = set(made._train.tokens.tolist()) - {0}, set(made._val.tokens.tolist()) - {0}
    assert val == {ord("0") + i for i in range(40) if in_validation(f"{i}.txt", 0.3)}
    assert train | val == {ord("0") + i for i in range(40)}
    assert not train & val
    assert made._train.tokens[9] == 0  # the end of the first document


def test_one_file_is_cut_at_its_end(tmp_path):
    (tmp_path / "only.txt").write_text("a" * 80 + "b" * 19)
    made = module([tmp_path / "only.txt"], val_fraction=0.2)
    assert made._train.tokens.tolist() == [ord("a")] * 80
    assert made._val.tokens.tolist() == [ord("b")] * 19 + [0]


def test_no_validation_on_request(tmp_path):
    (tmp_path / "only.txt").write_text("a" * 100)
    made = module([tmp_path], val_fraction=0.0)
    assert made.val_dataloader() == []
    assert len(made._train.tokens) == 101


def test_order_depends_on_seed_and_epoch_only(tmp_path):
    (tmp_path / "only.txt").write_text("".join(map(chr, range(33, 120))) * 4)

    def order(seed, epoch):
        loader = module([tmp_path], seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [row.tolist() for batch in loader for row in batch["input_ids"]]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(0, 1))


def test_fewer_windows_than_a_batch_still_train(tmp_path):
    (tmp_path / "only.txt").write_text("a" * 30)
    made = module([tmp_path], batch_size=64, val_fraction=0.3)
    assert [batch["input_ids"].shape for batch in made.train_dataloader()] == [(5, 4)]


def test_the_standard_library_is_the_default():
    made = TextDataModule(seq_len=256)
    made.setup("fit")
    assert made.vocab_size == 256
    assert 0.01 < len(made._val.tokens) / len(made._train.tokens) < 0.2
    assert "def " in made.tokenizer.decode(made._train.tokens[:100_000])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"val_fraction": -0.1}, "val_fraction=-0.1"),
    ],
)
def test_numbers_out_of_range(arguments, words):
    with pytest.raises(DataError, match=words):
        TextDataModule(**arguments)


def test_text_that_is_empty_or_too_short(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text"):
        module([tmp_path])
    (tmp_path / "a.txt").write_text("x" * 20)
    with pytest.raises(DataError, match=r"training text has 17 tokens.*seq_len=50"):
        module([tmp_path], seq_len=50, val_fraction=0.2)
    with pytest.raises(DataError, match=r"validation text has 4 tokens.*val_fraction"):
        module([tmp_path], seq_len=4, val_fraction=0.2)
