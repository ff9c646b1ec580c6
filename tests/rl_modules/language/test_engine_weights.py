"""Weights on their way to another engine: names, adapters, tied layers, and the check that catches a missing one."""

import os
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

from rl_modules.common.errors import UsageError
from rl_modules.language import sampling
from rl_modules.language.architecture import transformers_model
from rl_modules.language.sampling import make_sampler, remote, vllm, weights
from rl_modules.language.sampling.vllm import sampling_fields
from rl_modules.language.sampling.weights import engine_config, fingerprint, named_weights
from tests.conformance.architectures import ARCHITECTURES, network
from tests.rl_modules.language.sampler_cases import FakeLLM, fake_vllm, running_server, settings, tiny_model


def adapted(model: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    lora = LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    model = get_peft_model(tiny_model(tied=False) if model is None else model, lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"use_rslora": True},
     {"target_modules": ["q_proj"], "lora_bias": True}],
    ids=["matrices", "a whole module", "DoRA", "rsLoRA", "biases"],
)  # fmt: skip
def test_adapters_are_merged_as_peft_merges_them(options: dict[str, Any]) -> None:
    model = adapted(**options)
    found = {name: weight.clone() for name, weight in named_weights(model)}  # peft merges in place
    expected = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=["one", "two"])
def test_adapters_of_experts_are_merged_as_peft_merges_them(parameters: list[str]) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)  # fmt: skip
    targets = {"target_modules": ["q_proj"], "target_parameters": [f"mlp.experts.{name}" for name in parameters]}
    model = adapted(AutoModelForCausalLM.from_config(config), **targets)
    found = {name: weight.clone() for name, weight in named_weights(model)}
    expected = dict(named_weights(model.merge_and_unload()))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)


def test_adapters_without_matrices_are_refused() -> None:
    with pytest.raises(UsageError, match="lora changes model.embed_tokens.*trainable_token_indices"):
        dict(named_weights(adapted(trainable_token_indices=[1, 2])))


def test_weights_have_the_names_of_a_checkpoint_where_memory_has_others(tmp_path: Any) -> None:
    """Mixtral holds its experts in one tensor, its checkpoints one by one."""
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    expected = load_file(tmp_path / "model.safetensors")
    found = dict(named_weights(model))
    assert found.keys() == expected.keys() and len(found.keys() - dict(model.named_parameters()).keys()) > 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "T5"])  # refused
def test_every_architecture_s_weights_are_those_of_its_checkpoint(name: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = network(name)
    with torch.no_grad():
        for buffer in model.buffers():  # DeepSeek-V3 routes by one
            if buffer.is_floating_point():
                buffer.normal_()
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = dict(named_weights(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_buffers_of_a_checkpoint_come_beside_adapters() -> None:
    model = adapted(network("DeepSeek-V3"), target_modules=["o_proj"])
    found = {name for name, _ in named_weights(model)}
    biases = {name for name in found if name.endswith("mlp.gate.e_score_correction_bias")}
    assert biases and found == set(dict(named_weights(model.merge_and_unload())))


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "adapters"])
def test_weights_are_made_whole_one_by_one_or_by_layer(name: str, monkeypatch: Any) -> None:
    made = []
    network_of = {"qwen2": tiny_model, "adapters": adapted, "mixtral": lambda: network("Mixtral")}
    model = network_of[name]()
    attribute = "_with_adapters" if name == "adapters" else "_whole"
    whole = getattr(weights, attribute)
    monkeypatch.setattr(weights, attribute, lambda *given: made.append(1) or whole(*given))
    ahead = 0
    for n, _ in enumerate(named_weights(model)):
        ahead = max(ahead, len(made) - n - 1)
    largest = max(len(list(layer.parameters())) for layer in transformers_model(model).model.layers)
    assert made and ahead <= (largest if name == "mixtral" else 0)


@pytest.mark.parametrize(("options", "parted"), [
    ({"target_modules": ["q_proj", "lm_head"]}, True), ({"target_modules": ["embed_tokens"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True), ({"target_modules": ["q_proj"]}, False),
])  # fmt: skip
def test_adapters_on_a_tied_layer_give_the_engine_an_output_layer_of_its_own(
    options: dict[str, Any], parted: bool, monkeypatch: Any
) -> None:
    """Independent source: the engine's own log-probabilities, which the check compares with the model's."""
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(tied=True), LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)  # of 1, logits are so large that rounding differs between two caches
    fake_vllm(monkeypatch)
    make_sampler("vllm", {}, None, model).update_weights(model)
    assert FakeLLM.made[-1].network.config.tie_word_embeddings is not parted


@pytest.mark.parametrize("server", [False, True])
def test_the_check_refuses_an_engine_that_lacks_a_weight(server: bool, monkeypatch: Any) -> None:
    fake_vllm(monkeypatch)
    model = tiny_model(tied=False)

    def without_one(model: Any) -> Any:
        for name, weight in named_weights(model):
            yield name, torch.zeros_like(weight) if name == "model.layers.1.mlp.down_proj.weight" else weight

    monkeypatch.setattr(vllm, "named_weights", without_one)
    monkeypatch.setattr(remote, "named_weights", without_one)
    with running_server(model) as (_, address):
        kind, options = ("vllm_server", {"addresses": [address]}) if server else ("vllm", {})
        with pytest.raises(UsageError, match=f"sampler={kind} differs from the model by"):
            make_sampler(kind, options, None, model).update_weights(model)


def test_an_engine_computes_as_training_does_under_autocast(monkeypatch: Any) -> None:
    """Under ``bf16-mixed`` weights are float32, in which an engine would take twice the memory and time."""
    fake_vllm(monkeypatch)
    model = tiny_model()
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            sampler: Any = make_sampler("vllm", {}, None, model)
            sampler.update_weights(model, 0)
            sampler.sample([[3, 4, 5]], 2, [1, 2], settings())
        assert FakeLLM.made[-1].options["dtype"] == ("float32" if dtype is None else "bfloat16")
        assert engine_config(model)["dtype"] == "float32"
        sampler.close()


def test_weights_are_sent_when_they_have_changed(monkeypatch: Any) -> None:
    fake_vllm(monkeypatch)
    model = tiny_model()
    sampler: Any = make_sampler("vllm", {}, 7, model)
    llm = FakeLLM.made[0]
    assert llm.options["max_num_seqs"] == 7 and llm.options["max_model_len"] == 48
    for version in (0, 0, 1):
        sampler.update_weights(model, version)
    assert llm.calls.count("load_weights_of") == 2
    model.load_state_dict(tiny_model(seed=1).state_dict())  # a checkpoint, at the same step
    sampler.update_weights(model, 1)
    assert llm.calls.count("load_weights_of") == 3
    # Cached keys and values are those of the old weights.
    assert [llm.calls[i + 1] for i, call in enumerate(llm.calls) if call == "load_weights_of"] == [
        "reset_prefix_cache"
    ] * 3
    assert fingerprint(model, 1) != fingerprint(tiny_model(), 1)
    sampler.forget_weights()
    for _ in range(2):
        sampler.update_weights(model, 1)
    assert llm.calls.count("load_weights_of") == 4


def test_on_cuda_the_engine_sleeps_while_the_module_trains(monkeypatch: Any) -> None:
    fake_vllm(monkeypatch)
    model = tiny_model()
    sampler: Any = make_sampler("vllm", {"gpu_memory_utilization": 0.4}, None, model)
    sampler.on_cuda = True
    sampler.update_weights(model, 0)
    sampler.sleep()
    sampler.sleep()
    sampler.update_weights(model, 0)
    calls = [call for call in FakeLLM.made[0].calls if call != "reset_prefix_cache"]
    assert calls == ["load_weights_of", "sleep 2", "wake_up", "load_weights_of"]


def test_filters_in_another_order_are_refused(monkeypatch: Any) -> None:
    fake_vllm(monkeypatch)
    with pytest.raises(UsageError, match="min_p=0.1 with top_p=0.9: vLLM applies min_p first"):
        sampling_fields(settings(min_p=0.1, top_p=0.9), 0, 4)


def test_vllm_beside_other_ranks_has_an_engine_on_each(monkeypatch: Any) -> None:
    fake_vllm(monkeypatch)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # is put back after the test
        monkeypatch.delenv(name)
    sampler: Any = make_sampler("vllm", {}, None, tiny_model(), ranks=(1, 2, 1))
    assert FakeLLM.made[-1].options["distributed_executor_backend"] == "external_launcher"
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "1", "2"]
    assert vllm.among_ranks(9, 16, 1) and os.environ["LOCAL_RANK"] == "1"
    sampler.close()
    assert "shutdown" not in FakeLLM.made[-1].calls  # it would end training's process group
    make_sampler("vllm", {}, None, tiny_model()).close()
    assert "shutdown" in FakeLLM.made[-1].calls
    assert "distributed_executor_backend" not in FakeLLM.made[-1].options


def test_vllm_on_split_weights_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(sampling, "is_sharded", lambda model: True)
    with pytest.raises(UsageError, match="sampler=vllm has whole weights on each rank, and the strategy splits them"):
        make_sampler("vllm", {}, None, tiny_model(), ranks=(0, 2, 0))
