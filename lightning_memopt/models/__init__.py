"""What the shipped configs train: a small Llama and any Hugging Face causal language model."""

from lightning_memopt.models.causal_lm import CausalLM
from lightning_memopt.models.checkpoint import load_module
from lightning_memopt.models.hf import HFCausalLM
from lightning_memopt.models.llama import Llama
from lightning_memopt.models.llama_module import LlamaModule, load_llama

__all__ = ["CausalLM", "HFCausalLM", "Llama", "LlamaModule", "load_llama", "load_module"]
