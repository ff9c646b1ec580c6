"""Encoders of every observation space, towers computed together, and how they start."""

import math
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_modules import DQN, PPO
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode, tree_leaves, tree_map
from rl_modules.common.spaces import observation_arrays, space_from_dict, space_to_dict
from rl_modules.crossq import RenormalizedCritics
from rl_modules.fast.modules import FastTanh
from rl_modules.networks.actor_critic import ActorCritic
from rl_modules.networks.critics import Critics, ValueNetwork
from rl_modules.networks.encoders import build_encoder
from rl_modules.networks.features import as_floats
from rl_modules.networks.layers import ParallelMLP
from rl_modules.networks.nature_cnn import NatureCNN, SmallCNN, image_brief
from rl_modules.networks.q_network import DistributionalQNetwork, QNetwork
from rl_modules.pqn import NormalizedQNetwork
from rl_modules.recurrent import RecurrentActorCritic

IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
SPACES = {
    "vector": (spaces.Box(-1, 1, (3,)), 3),
    "matrix": (spaces.Box(-1, 1, (2, 3)), 6),
    "Discrete": (spaces.Discrete(4, start=2), 4),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), 5),
    "MultiBinary": (spaces.MultiBinary(3), 3),
    "image, channels last": (IMAGE, 512),
    "image, channels first": (spaces.Box(0, 255, (4, 36, 40), np.uint8), 512),
    "Dict": (spaces.Dict({"a.b": spaces.Discrete(3), "image": IMAGE, "v": spaces.Box(-1, 1, (2,))}), 3 + 256 + 2),
    "Tuple": (spaces.Tuple([spaces.Discrete(3), spaces.Dict({"x": spaces.Box(-1, 1, (2,))})]), 5),
}


def batch(space, n=5):
    space.seed(0)
    samples = [observation_arrays(space, space.sample()) for _ in range(n)]
    return tree_map(lambda *each: torch.from_numpy(np.stack(each)), *samples)


def test_tanh_is_tanh():
    x = torch.linspace(-20, 20, 4001, requires_grad=True)
    reference = torch.tanh(x.detach().double())
    y = FastTanh()(x)
    assert (y.detach().double() - reference).abs().max() < 2.5e-7
    gradient = torch.autograd.grad(y.sum(), x)[0]
    assert (gradient.double() - (1 - reference**2)).abs().max() < 1e-6
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(FastTanh()(x.to(dtype)), torch.tanh(x.to(dtype)))


def test_parallel_towers_equal_towers_of_linear_layers():
    torch.manual_seed(0)
    towers = ParallelMLP(2, [3, 8, 5], "tanh")
    x = torch.randn(6, 3)
    for k, result in enumerate(towers(x)):
        single = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh())
        for ours, theirs in zip((towers.layers[0], towers.layers[2]), (single[0], single[2]), strict=True):
            theirs.weight.data, theirs.bias.data = ours.weight[k].T, ours.bias[k, 0]
        torch.testing.assert_close(result, single(x))


class OnCuda(torch.Tensor):
    """A tensor that takes itself for one on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_on_a_gpu_networks_of_many_rows_are_multiplied_one_by_one():
    torch.manual_seed(0)
    towers, found = ParallelMLP(3, [4, 8, 5], "relu"), []
    for x in (torch.randn(1100, 4), torch.randn(1000, 4)):
        for kind in (torch.Tensor, OnCuda):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                result = torch.stack(towers(x.as_subclass(kind))).as_subclass(torch.Tensor)
            seen = {event.key: event.count for event in profile.key_averages()}
            assert ("aten::baddbmm" in seen) == (kind is torch.Tensor or len(x) == 1000)
            slopes = torch.autograd.grad(result.square().sum(), list(towers.parameters()))
            found.append([result, *slopes])
        for ours, expected in zip(*found[-2:], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


STATE = spaces.Box(-1, 1, (4,))


@pytest.mark.parametrize("make", [
    lambda: QNetwork(STATE, 4, [64, 64]),
    lambda: QNetwork(STATE, 4, [64], dueling=True),
    lambda: DistributionalQNetwork(STATE, 4, 5, [64]),
    lambda: DistributionalQNetwork(STATE, 4, 5, [64], dueling=True),
    lambda: NormalizedQNetwork(STATE, 4, [64], "relu"),
], ids=["plain", "dueling", "distributional", "distributional dueling", "pqn"])  # fmt: skip
def test_large_values_keep_their_differences_under_autocast(make):
    """Around 90 the numbers of bfloat16 are half a unit apart: 23 to 62 % of the actions were others."""
    torch.manual_seed(0)
    network, observation = make(), torch.rand(500, 4) * 2 - 1
    with torch.no_grad():
        getattr(network, "value_head", network.head).bias += 90
        values = [network(observation)]
        with torch.autocast("cpu", torch.bfloat16):
            values.append(network(observation))
    assert values[1].dtype is torch.float32
    full, half = (q.mean(1) if q.dim() == 3 else q for q in values)
    assert (full.argmax(1) == half.argmax(1)).float().mean() > 0.95


@pytest.mark.parametrize("make", [
    lambda: (network := ActorCritic(STATE, spaces.Discrete(2), [64]), network.value_head, lambda x: network(x)[1]),
    lambda: (network := ValueNetwork(STATE, [64]), network.head, network),
    lambda: (network := RecurrentActorCritic(STATE, spaces.Discrete(2), hidden_size=32), network.value_head,
             lambda x: network(x[:, None], network.initial_state(len(x)))[1]),
    lambda: (network := Critics(STATE, 4, 2, [64]), network.layers[-1], lambda x: network(x, x)),
    lambda: (network := RenormalizedCritics(STATE, 4, 2, [64]), network.layers[-1], lambda x: network(x, x)),
], ids=["actor-critic", "value network", "recurrent", "critics", "CrossQ's critics"])  # fmt: skip
def test_large_values_of_critics_are_precise_under_autocast(make):
    """In bfloat16 they would be up to a fourth away from those in float32."""
    torch.manual_seed(0)
    _, head, value = make()
    observation = torch.rand(500, 4) * 2 - 1
    with torch.no_grad():
        head.bias += 90
        full = value(observation)
        with torch.autocast("cpu", torch.bfloat16):
            half = value(observation)
    assert half.dtype is torch.float32
    torch.testing.assert_close(half, full, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", SPACES)
def test_every_observation_space_is_encoded_by_what_it_holds(name):
    space, width = SPACES[name]
    encoder = build_encoder(space)
    x = batch(space)
    assert encoder.out_features == width
    assert encoder(x).shape == (5, width)
    torch.testing.assert_close(encoder(x)[2:3], encoder(tree_map(lambda leaf: leaf[2:3], x)))


def test_choices_are_one_hot_from_the_spaces_start_on():
    space = spaces.Discrete(4, start=2)
    x = torch.from_numpy(observation_arrays(space, np.array([2, 5])))
    assert build_encoder(space)(x).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert build_encoder(spaces.MultiDiscrete([2, 3]))(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Discrete(3), [2, -1]),
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3, start=1), [0, 1]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [1, 3]]),
        (spaces.Dict(of=spaces.Discrete(2)), {"of": [5]}),
    ],
)
def test_choices_outside_of_their_space_are_refused(space, observation):
    with pytest.raises(UsageError, match=r"^an observation is .*, which is outside of its space (Multi)?Discrete\("):
        observation_arrays(space, observation)


def test_images_are_scaled_and_their_channels_found_on_either_side():
    torch.manual_seed(0)
    last = NatureCNN(IMAGE)
    first = NatureCNN(spaces.Box(0, 255, (3, 36, 40), np.uint8))
    first.load_state_dict(last.state_dict())
    image = torch.randint(256, (2, 36, 40, 3), dtype=torch.uint8)
    torch.testing.assert_close(last(image), first(image.permute(0, 3, 1, 2)))
    scaled = last.head(last.convolutions(image.permute(0, 3, 1, 2) / 255.0))
    torch.testing.assert_close(last(image), scaled)


@pytest.mark.parametrize(("side", "places"), [(4, 1), (7, 4), (11, 8), (12, 4), (19, 7), (20, 4), (35, 7)])
def test_small_images_get_a_small_convolution(side, places):
    space = spaces.Box(0, 255, (side, side + 3, 3), np.uint8)
    encoder = build_encoder(spaces.Dict(view=space, direction=spaces.Discrete(4)))
    small = encoder.encoders[list(encoder.keys).index("view")]
    assert isinstance(small, SmallCNN)
    image = torch.randint(256, (2, side, side + 3, 3), dtype=torch.uint8)
    x = image.permute(0, 3, 1, 2) / 255.0
    for layer in small.convolutions[:-1:2]:
        x = torch.nn.functional.conv2d(x, layer.weight, layer.bias, layer.stride).relu()
    assert x.shape[2] == places
    torch.testing.assert_close(small(image), small.head(x.flatten(1)))
    assert encoder({"view": image, "direction": torch.tensor([0, 3])}).shape == (2, 256 + 4)


def test_images_of_fewer_pixels_are_flattened():
    assert build_encoder(spaces.Box(0, 255, (3, 9, 3), np.uint8)).out_features == 81


@pytest.mark.parametrize("net_arch", [None, [8], {"pi": [8], "vf": [16, 16]}, []])
def test_policy_starts_nearly_uniform_and_towers_are_separate(net_arch):
    torch.manual_seed(0)
    network = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), net_arch)
    policy, value = network(torch.randn(50, 3))
    assert value.shape == (50,)
    assert (policy.log_p.exp() - 0.25).abs().max() < 0.03
    weights = [p for p in network.parameters() if p.ndim > 1]
    by_policy = torch.autograd.grad(policy.log_p[:, 0].sum(), weights, allow_unused=True, retain_graph=True)
    by_value = torch.autograd.grad(value.sum(), weights, allow_unused=True)
    for a, b in zip(by_policy, by_value, strict=True):
        if a is not None and b is not None:
            # One tensor holds both towers: each gradient is zero where the other is not.
            assert ((a.abs() > 0) & (b.abs() > 0)).sum() == 0


def test_orthogonal_weights_have_the_gains_of_the_original():
    torch.manual_seed(0)
    network = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4))
    hidden = network.towers.layers[2].weight
    for tower in hidden:
        torch.testing.assert_close(tower @ tower.T, 2 * torch.eye(64), atol=1e-5, rtol=0)
    head = network.policy_head.weight
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(4), atol=1e-9, rtol=0)
    assert network.value_head.weight.norm().item() == pytest.approx(1.0)
    assert all((bias == 0).all() for name, bias in network.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", SPACES)
def test_spaces_survive_as_plain_data(name):
    space, _ = SPACES[name]
    assert space_from_dict(space_to_dict(space)) == space


def test_unequal_bounds_survive_and_other_spaces_are_named():
    space = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, np.inf], np.float32))
    assert space_from_dict(space_to_dict(space)) == space
    with pytest.raises(UsageError, match="is of type Sequence; supported are Box"):
        space_to_dict(spaces.Sequence(spaces.Discrete(2)))


def test_evaluation_mode_is_for_all_parts_and_leaves_each_as_it_was():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2)))
    network[1][1].eval()  # frozen statistics
    before = [part.training for part in network.modules()]
    x = torch.ones(4, 2)
    with evaluation_mode(network.modules()):
        assert not any(part.training for part in network.modules())
        torch.testing.assert_close(network(x), network[1][1](network[0](x)))
    assert [part.training for part in network.modules()] == before == [True, True, True, True, False]


def _pixels(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (2, *shape), dtype=np.uint8))


@pytest.mark.parametrize(
    ("shape", "to_channels_first"),
    [
        ((44, 40), lambda x: x[:, None]),
        ((4, 44, 40), lambda x: x),
        ((44, 40, 3), lambda x: x.permute(0, 3, 1, 2)),
        ((4, 44, 40, 3), lambda x: torch.cat([frame.permute(0, 3, 1, 2) for frame in x.unbind(1)], 1)),
        ((4, 3, 44, 40), lambda x: torch.cat(x.unbind(1), 1)),
    ],
)
def test_images_of_any_usual_form_reach_the_convolutions(shape, to_channels_first):
    pixels = _pixels(shape)
    expected = to_channels_first(pixels).float() / 255
    for space, image in (
        (spaces.Box(0, 255, shape, np.uint8), pixels),
        (spaces.Box(0.0, 1.0, shape, np.float32), pixels.float() / 255),
        (spaces.Box(0.0, 255.0, shape, np.float32), pixels.float()),
    ):
        encoder = build_encoder(space, features_dim=8)
        assert isinstance(encoder, NatureCNN)
        seen = []
        encoder.convolutions.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        assert encoder(image).shape == (2, 8)
        torch.testing.assert_close(seen[0], expected)


@pytest.mark.parametrize(
    "space", [spaces.Box(-np.inf, np.inf, (44, 40), np.float32), spaces.Box(-1.0, 1.0, (3, 44, 40), np.float32)]
)
def test_arrays_whose_bounds_are_no_pixels_are_no_images(space):
    assert not isinstance(build_encoder(space), NatureCNN)


def test_a_small_picture_is_flattened_and_scaled():
    encoder = build_encoder(spaces.Box(0, 255, (8, 8), np.uint8))
    pixels = _pixels((8, 8))
    torch.testing.assert_close(encoder(pixels), pixels.flatten(1).float() / 255)


@pytest.mark.parametrize(
    "name", ["encoder", "towers", "towers.layers", "towers.layers.0", "towers.layers.1", "policy_head"]
)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_every_part_are_called(name, kind):
    network = ActorCritic(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
    calls = []
    part = network.get_submodule(name)
    getattr(part, f"register_{kind}_hook")(lambda *_: calls.append(name) and None)
    observation = torch.randn(2, 3, requires_grad=True)
    policy, value = network(observation)
    (policy.log_p.sum() + policy.log_p[0, 0] + value.sum()).backward()
    assert calls == [name]


def test_global_hooks_see_every_layer():
    network = QNetwork(spaces.Box(-1, 1, (3,), np.float32), 2)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        network(torch.randn(1, 3))
    finally:
        handle.remove()
    assert seen.count("Linear") == 3 and "Sequential" in seen and seen[-1] == "QNetwork"


def test_exported_tanh_holds_no_global_tensor_and_has_the_same_bits():
    x = torch.linspace(-20, 20, 4001).unsqueeze(0)
    program = torch.export.export(FastTanh(), (x,))
    assert not [node for node in program.graph.nodes if node.op == "get_attr"]
    assert not program.constants
    assert torch.equal(program.module()(x), FastTanh()(x))


class Floats(nn.Module):
    """What a feature extractor of the user's gets."""

    def __init__(self, space):
        super().__init__()
        self.space = space

    def forward(self, observation):
        return as_floats(observation, self.space)


@pytest.mark.parametrize("make", [build_encoder, Floats])
@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiBinary", "Tuple"])
def test_exported_encoders_take_batches_of_any_size(name, make):
    space, encoder = SPACES[name][0], make(SPACES[name][0])
    sizes = tree_map(lambda x: {0: torch.export.Dim("batch")}, batch(space, 8))
    program = torch.export.export(encoder, (batch(space, 8),), dynamic_shapes=(sizes,)).module()
    for n in (8, 3):
        found, expected = (tree_leaves(one(x)) for x in [batch(space, n)] for one in (program, encoder))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("space", "text"), [
    (spaces.Box(0, 255, (84, 84), np.uint8), "84×84 pixels, 1 channel (uint8, divided by 255)"),
    (spaces.Box(0, 255, (4, 84, 96), np.uint8), "84×96 pixels, 4 channels (uint8, divided by 255)"),
    (spaces.Box(0, 255, (84, 96, 3), np.uint8), "84×96 pixels, 3 channels (uint8, divided by 255)"),
    (spaces.Box(0, 1, (3, 64, 64), np.float32), "64×64 pixels, 3 channels (float32, divided by 1)"),
    (spaces.Box(0, 255, (4, 84, 96, 3), np.uint8), "84×96 pixels, 12 channels (uint8, divided by 255)"),
    (spaces.Box(-1, 1, (64, 64), np.float32), None),
    (spaces.Discrete(3), None),
])  # fmt: skip
def test_images_are_described_as_the_encoder_sees_them(space, text):
    brief = image_brief(space)
    assert brief is None if text is None else text in brief
    if text is not None:
        encoder = build_encoder(space)
        channels, height, width = (int(n) for n in re.search(r"(\d+)×(\d+) pixels, (\d+)", brief).group(3, 1, 2))
        assert encoder.convolutions[0].in_channels == channels
        assert encoder(torch.as_tensor(space.sample())[None]).shape == (1, encoder.out_features)
        assert math.prod(space.shape) == channels * height * width


def test_a_module_s_text_shows_the_sizes_of_its_layers():
    kinds = {"observation_space": spaces.Box(-1, 1, (3,)), "action_space": spaces.Discrete(2)}
    ppo, dqn = PPO(net_arch=[7, 5], **kinds), DQN(net_arch=[7], noisy=True, dueling=True, **kinds)
    for model in (ppo, dqn):
        model.configure_model()
    assert "VectorEncoder(out_features=3)" in repr(ppo)
    assert "ParallelLinear(2 of in_features=3, out_features=7)" in repr(ppo)
    assert "NoisyLinear(2 of in_features=3, out_features=7)" in repr(dqn)
    assert "NoisyLinear(in_features=7, out_features=2)" in repr(dqn)
