import pytest
import torch

from lightning_memopt.models import LlamaModule
from lightning_memopt.models.llama_module import sample


@pytest.fixture
def module():
    torch.manual_seed(0)
    return LlamaModule(hidden_size=32, num_layers=1, num_heads=2, max_seq_len=8).eval()


def test_greedy_generation_takes_the_likeliest_token(module):
    ids = torch.tensor([1, 2, 3])
    new = module.generate(ids, 3, temperature=0)
    for count in range(3):
        context = torch.cat((ids, new[:count]))
        assert new[count] == module(context[None])[0, -1].argmax()


def test_generation_goes_on_past_the_context(module):
    assert len(module.generate(torch.arange(20), 15, temperature=1.0)) == 15


def test_generation_ends_before_the_stop_token(module):
    free = module.generate(torch.tensor([5]), 10, temperature=0)
    stop = free[4].item()
    first = free.tolist().index(stop)
    assert module.generate(torch.tensor([5]), 10, temperature=0, stop_id=stop).tolist() == free[:first].tolist()


def test_top_k_leaves_out_the_rest():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    drawn = {sample(logits, 5.0, 2).item() for _ in range(100)}
    assert drawn == {1, 3}
    assert {sample(logits, 5.0, 99).item() for _ in range(200)} == {0, 1, 2, 3}
