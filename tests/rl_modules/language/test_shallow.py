"""Self-checks on a model's first layers: every kind of layer is among them, and the whole model has the last word."""

import pytest
import torch

from rl_modules import GRPO
from rl_modules.language.fast.packing import can_pack_texts
from rl_modules.language.fast.self_check import _known, agrees, blocks_of, body_of, first_layers, require_left_to_right
from rl_modules.language.fast.shared_scoring import can_share
from rl_modules.language.sampling import sample
from tests.conformance.architectures import ARCHITECTURES, BASE, EXPERTS, HEADS, WINDOW, network

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
#: Layers, and how many of them hold every kind and end with the last one's.
DEPTHS = {
    "llama": ({"model_type": "llama", **BASE, "num_hidden_layers": 12}, 2),
    "gemma-3, five to one": (
        {"model_type": "gemma3_text", **WINDOW, "num_hidden_layers": 12, "layer_types": [*[SLIDING] * 5, FULL] * 2}, 6
    ),
    "gemma-3, which ends with windows": (
        {"model_type": "gemma3_text", **WINDOW, "num_hidden_layers": 16,
         "layer_types": [*[SLIDING] * 5, FULL, *[SLIDING] * 5, FULL, *[SLIDING] * 4]}, 7
    ),
    "qwen3-moe, first layer dense": (
        {"model_type": "qwen3_moe", **HEADS, **EXPERTS, "num_hidden_layers": 8, "mlp_only_layers": [0]}, 2
    ),
    "qwen3-moe, layer 5 dense": (
        {"model_type": "qwen3_moe", **HEADS, **EXPERTS, "num_hidden_layers": 8, "mlp_only_layers": [5]}, None
    ),
    "qwen3-next": (
        {**ARCHITECTURES["Qwen3-Next"], "num_hidden_layers": 8, "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2}, 4
    ),
    "gpt-2": ({**ARCHITECTURES["GPT-2"], "n_layer": 6}, 2),
    "two layers": ({"model_type": "llama", **BASE}, None),
}  # fmt: skip


def build(fields, head="causal"):
    from rl_modules.language.architecture import make_config
    from rl_modules.language.models import make_model
    from rl_modules.language.tokenizer import character_tokenizer

    torch.manual_seed(0)
    return make_model(make_config(None, fields, character_tokenizer(), dropout=False), head=head).eval()


@pytest.mark.parametrize("kind", DEPTHS)
def test_the_first_layers_hold_every_kind(kind):
    fields, depth = DEPTHS[kind]
    model = build(fields)
    _, blocks = blocks_of(body_of(model))
    before, config = list(model.state_dict()), model.config.to_dict()
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        with first_layers(model) as is_part:
            assert is_part == (depth is not None)
            left = blocks_of(body_of(model))[1]
            assert list(left) == list(blocks)[: depth or len(blocks)]  # the model's own layers
            part = model(input_ids=tokens).logits
            assert model.config.num_hidden_layers == len(left)
    assert torch.equal(part, whole) == (depth is None)
    assert torch.equal(model(input_ids=tokens).logits, whole)
    assert list(model.state_dict()) == before and model.config.to_dict() == config


@pytest.mark.long
@pytest.mark.parametrize("kind", DEPTHS)
def test_the_checks_find_the_same_on_few_layers(kind, monkeypatch):
    fields, _ = DEPTHS[kind]
    found = []
    for whole in (False, True):
        model = build(fields)
        if whole:
            monkeypatch.setattr("rl_modules.language.fast.self_check._depth", lambda blocks: None)
        module = GRPO()
        module.model = model
        module.check_architecture()
        can_share(model, 8), can_pack_texts(model)
        sample(model, [[5, 6], [7], [8]], max_completion_length=2, eos_token_id=2, pad_token_id=0, seeds=range(3),
               max_rows_in_flight=2)  # fmt: skip
        found.append(_known[model])
    assert found[0] == found[1]
    assert len(found[0]) >= 4


def test_a_deep_model_is_checked_at_the_cost_of_a_shallow_one():
    fields = {"model_type": "llama", **BASE}
    passes = []
    for layers in (2, 24):
        model = build({**fields, "num_hidden_layers": layers})
        count = [0]
        for block in model.model.layers:
            block.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        require_left_to_right(model)
        assert can_share(model, 8) and can_pack_texts(model)
        passes.append(count[0])
    assert passes[0] == passes[1]


def test_what_the_first_layers_disagree_about_is_compared_on_all():
    model = network("Llama")
    model.model.layers.extend([network("Llama").model.layers[1] for _ in range(2)])
    model.config.num_hidden_layers = 4
    depths = []

    def compare():
        depths.append(len(model.model.layers))
        error = float(len(depths) == 1)
        return torch.full((2,), error), torch.zeros(2), torch.zeros(2)

    assert agrees(model, "differing at first", compare, "") and depths == [2, 4]


def test_layers_come_back_after_an_error():
    model = build(DEPTHS["llama"][0])
    with pytest.raises(RuntimeError), first_layers(model):
        raise RuntimeError
    assert len(model.model.layers) == 12 == model.config.num_hidden_layers
