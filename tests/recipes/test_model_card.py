"""The model card is one that the Hugging Face Hub reads."""

import pytest

from recipes.model_card import model_card

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the language extra")


def test_the_hub_s_own_reader_finds_the_result() -> None:
    text = model_card(
        "PPO-CartPole-v1", "PPO, trained on CartPole-v1.", task_type="reinforcement-learning", dataset="CartPole-v1",
        results={"mean_reward": "500.0 +/- 0.0"}, settings={"gamma": 0.98}, command="rl fit --config ppo/cartpole.yaml",
        usage="PPO.load_from_checkpoint(path)", tags=["PPO"], packages=["torch"],
    )  # fmt: skip
    card = huggingface_hub.ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == (
        "CartPole-v1", "mean_reward", "500.0 +/- 0.0")  # fmt: skip
    assert card.data.tags == ["reinforcement-learning", "PPO"] and card.data.license is None
    for shown in ("| mean_reward | 500.0 +/- 0.0 |", "gamma: 0.98", "rl fit --config ppo/cartpole.yaml", "torch 2."):
        assert shown in card.text
