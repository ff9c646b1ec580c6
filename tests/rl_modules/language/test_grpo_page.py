"""What docs/language/advantages.md shows as an own advantage and loss works as it stands there, in few lines."""

import ast
import re
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset

from datamodules import PromptDataModule
from rl_modules import GRPO
from rl_modules.common.loading import load_object
from tests.rl_modules.language.test_grpo import TINY, batch_by_hand, gradient_of
from tests.training import fit

PAGE = (Path(__file__).parents[3] / "docs/language/advantages.md").read_text("utf-8")
CODE = re.search(r"```python\n# my_project/rl.py\n(.*?)```", PAGE, re.DOTALL)[1]
CONFIG = yaml.safe_load(re.search(r"```yaml\nmodel:\n  class_path: my_project.*?```", PAGE, re.DOTALL)[0][8:-3])


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "rl.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    cls = load_object(CONFIG["model"]["class_path"], "model")
    module = cls(model_config=TINY, max_completion_length=5, **CONFIG["model"]["init_args"])
    module.configure_model()
    return module


def test_each_takes_at_most_fifteen_lines():
    lengths = [
        node.end_lineno - node.lineno + 1 for node in ast.parse(CODE).body if not isinstance(node, ast.ImportFrom)
    ]
    assert len(lengths) == 2 and max(lengths) <= 15


def test_the_advantage_is_used(module):
    reward = torch.tensor([0.0, 1.0, 5.0, 0.0, 0.0, 0.0])
    assert module.advantages(reward, 3).tolist() == [-1.0, -1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_loss_has_the_gradient_of_grpo_without_a_clip(module):
    batch = batch_by_hand(module)
    plain = GRPO(model_config=TINY, max_completion_length=5, loss_type="dapo", epsilon=1e6)
    plain.configure_model()
    plain.load_state_dict(module.state_dict())
    on_policy = {**batch, "on_policy": True}
    torch.testing.assert_close(gradient_of(module, on_policy)[1], gradient_of(plain, on_policy)[1])


# -------------------------------------------------------------------- rows that are skipped

KEEPS = re.search(r"```python\n(from rl_modules import GRPO\n\n\nclass WithImitation.*?)```", PAGE, re.DOTALL)[1]


def half_right(completions, prompts, **columns):
    """Every second prompt's completions are all right, the others' differ."""
    return [1.0 if len(prompt) % 2 else float(i % 2) for i, prompt in enumerate(prompts)]


def trained(cls):
    """How many rows each step's loss saw, and the weights after two steps."""
    seen = []

    class Spy(cls):
        def policy_loss(self, log_prob, batch):
            seen.append(len(log_prob))
            return super().policy_loss(log_prob, batch)

    rows = [{"prompt": "a" * (1 + i), "answer": ""} for i in range(4)]
    data = PromptDataModule(dataset=Dataset.from_list(rows), num_generations=4, batch_size=16, eval_steps=0,
                            reward_funcs=[half_right])  # fmt: skip
    model = Spy(model_config=TINY, max_completion_length=5, learning_rate=1e-2)
    fit(model, data, max_steps=2)
    return seen, torch.cat([p.detach().flatten() for p in model.model.parameters()])


@pytest.mark.long
def test_a_loss_sees_the_skipped_rows_where_prepare_keeps_them():
    class Keeps(GRPO):
        def prepare(self, rollout):
            fields = super().prepare(rollout)
            fields.pop("keep", None)
            return fields

    seen, weights = trained(GRPO)
    kept, same = trained(Keeps)
    assert seen == [8, 8] and kept == [16, 16]
    torch.testing.assert_close(same, weights, atol=1e-5, rtol=0)  # Adam makes rounding larger
    space = {}
    exec(KEEPS, space)
    more, other = trained(space["WithImitation"])
    assert more == [16, 16] and (other - weights).abs().max() > 1e-3
