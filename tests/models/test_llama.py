import json

import pytest
import torch

from lightning_memopt.models import Llama, LlamaModule, load_llama

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_seq_len": 32}


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_same_logits_as_transformers(tmp_path, kv_heads, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = LlamaModule(**SMALL, num_kv_heads=kv_heads, tie_embeddings=tied, rope_theta=500.0)
    # Away from the initial ones, so that a norm that is skipped or misplaced shows.
    with torch.no_grad():
        for name, parameter in module.net.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    module.export(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(256, (2, 20))
    torch.testing.assert_close(module(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_token_sees_only_its_past():
    net = Llama(**SMALL)
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = net(ids), net(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_and_load(tmp_path, tied, dtype):
    module = LlamaModule(**SMALL, tie_embeddings=tied).to(dtype)
    module.export(tmp_path)
    net = load_llama(tmp_path)
    for name, value in module.net.state_dict().items():
        assert net.state_dict()[name].dtype == dtype
        assert torch.equal(net.state_dict()[name], value), name
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
    assert net.hf_config.items() <= json.loads((tmp_path / "config.json").read_text()).items()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size=30"),
        ({"hidden_size": 12, "num_heads": 4}, "hidden_size=12"),
        ({"hidden_size": 32, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
    ],
)
def test_impossible_heads_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Llama(**arguments)


def test_default_feed_forward_width_is_a_multiple_of_32():
    width = Llama(hidden_size=100, num_layers=1, num_heads=2).hf_config["intermediate_size"]
    assert width == 288  # 8/3 of 100 is 266.7
