"""What docs/language/grpo.md shows as an advantage and a loss of one's own works as it stands there, in few lines."""

import ast
import re
from pathlib import Path

import pytest
import torch
import yaml

from rl_modules import GRPO
from rl_modules.common.loading import load_object
from tests.rl_modules.language.test_grpo import TINY, batch_by_hand, gradient_of

PAGE = (Path(__file__).parents[3] / "docs/language/grpo.md").read_text("utf-8")
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
