"""Samplers under test, behind the one protocol, and a vLLM that is none: transformers behind vLLM's interface."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_modules.language.sampling import NativeSampler, SamplingSettings
from rl_modules.language.sampling.native import sample
from rl_modules.language.sampling.remote import ServerSampler
from rl_modules.language.sampling.rows import Row, rows_of
from tests.rl_modules.language.fake_vllm_server import running_server

_REAL: list[Any] = []
WORDS, PAD, EOS, POSITIONS = 24, 0, 1, 48


def tiny_model(seed: int = 0, tied: bool = True) -> Any:
    """A model with peaked logits, whose distribution every mistake in the settings changes."""
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def settings(**different: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_completion_length": 8, "eos_token_id": (EOS,), "pad_token_id": PAD, **different})


class FakeLLM:
    """vLLM's ``LLM`` as far as it is called: the engine's config, SamplingParams, and what it answers."""

    made: ClassVar[list["FakeLLM"]] = []
    #: Whether it has the option ``return_sampling_mask``, as vLLM has on CUDA, but not on a CPU.
    masks = False

    def __init__(self, model: str, **options: Any) -> None:
        from transformers import AutoConfig

        if options.get("return_sampling_mask") and not self.masks:
            raise ValueError("sampling distribution replay requires Model Runner V2")
        assert options["logprobs_mode"] == "processed_logprobs"
        self.options = options
        self.network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.calls: list[str] = []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))
        FakeLLM.made.append(self)

    def collective_rpc(self, method: str, args: tuple[Any]) -> None:
        assert method == "load_weights_of" and self.options["worker_extension_cls"].endswith("serving.Loading")
        with torch.no_grad():
            own = dict(self.network.named_parameters())
            for name, weight in args[0]:
                own.pop(name).copy_(weight)
        assert not own, f"not loaded: {list(own)}"
        self.calls.append(method)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake_up")

    def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        first = parameters[0]
        for p in parameters:
            assert p.n == 1 and p.ignore_eos and not p.detokenize
            assert p.logprobs == 0 or (not self.masks and self.options["max_logprobs"] == -1)
            assert {**vars(p), "seed": 0, "max_tokens": 0} == {**vars(first), "seed": 0, "max_tokens": 0}
        written = sample(
            self.network, [prompt["prompt_token_ids"] for prompt in prompts], seeds=[p.seed for p in parameters],
            max_completion_length=max(p.max_tokens for p in parameters), eos_token_id=first.stop_token_ids,
            pad_token_id=0, temperature=first.temperature, top_k=first.top_k, top_p=first.top_p, min_p=first.min_p,
            repetition_penalty=first.repetition_penalty, return_sampling_mask=True,
        )  # fmt: skip
        return [self._output(row, p) for row, p in zip(rows_of(written), parameters, strict=True)]

    def _output(self, row: Row, p: Any) -> Any:
        # A row that stops at a limit of its own is a part of the longer one.
        pairs = list(zip(row.tokens, row.log_prob, strict=True))[: p.max_tokens]
        found = [{token: SimpleNamespace(logprob=value)} for token, value in pairs]
        kept = [] if row.kept is None else row.kept[: p.max_tokens]
        for ids, values in zip(kept, found, strict=False) if p.logprobs else ():
            others = [token for token in range(self.network.config.vocab_size) if token not in ids]
            for token in [*ids, *others][: p.logprobs]:
                values.setdefault(token, SimpleNamespace(logprob=-1.0 if token in ids else -math.inf))
        mask = SimpleNamespace(token_ids=kept) if self.masks and p.top_k > 0 else None
        tokens = [token for token, _ in pairs]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=found, sampling_mask=mask)])


def fake_vllm(monkeypatch: Any) -> None:
    """Stands in for the package ``vllm``."""
    package: Any = ModuleType("vllm")
    package.LLM = FakeLLM
    package.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", package)
    FakeLLM.made.clear()


@contextmanager
def sampler_of(kind: str, model: Any, monkeypatch: Any) -> Iterator[Any]:
    """A sampler with the model's weights: native, fake vllm, vllm, or servers with either engine."""
    from rl_modules.language.sampling import make_sampler

    if kind == "native":
        yield NativeSampler(model)
        return
    if kind == "server":
        with running_server(model) as (_, address):
            sampler: Any = ServerSampler([address], "cpu", retries=0)
            sampler.update_weights(model)
            yield sampler
        return
    if kind == "fake vllm":
        fake_vllm(monkeypatch)
        sampler = make_sampler("vllm", {}, None, model)
    else:  # one engine for all tests: each takes half a minute to start
        if not _REAL:
            _REAL.append(make_sampler("vllm", {}, None, model))
        sampler = _REAL[0]
    sampler.update_weights(model)
    yield sampler
    if kind == "fake vllm":
        sampler.close()
        assert FakeLLM.made[0].calls[-1] == "shutdown"
