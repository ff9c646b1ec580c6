"""Deferred imports: the modules are the real ones as soon as more of them is used than Lightning's import needs."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_module_is_whole_when_it_is_used():
    lines = run("""
        import sys
        from rl_modules.fast.imports import defer_imports
        defer_imports()
        import lightning
        print("torchmetrics.functional" in sys.modules)
        import torch, torchmetrics
        from lightning.pytorch.core.module import Metric
        print(torchmetrics.Metric is Metric, issubclass(torchmetrics.Accuracy, Metric), torchmetrics.__version__ > "1")
        mean = torchmetrics.MeanMetric()
        mean.update(torch.tensor([1.0, 3.0], device="cpu"))
        print(mean.compute().item(), torchmetrics.functional.accuracy.__name__)
        import matplotlib
        matplotlib.use("agg")
        print(*(type(part).__name__ for part in mean.plot()))
        print("torch._dynamo.eval_frame" in sys.modules)
        import torch._dynamo.utils as utils
        print(utils.__spec__.name, utils is torch._dynamo.utils, type(torch._dynamo).__name__)
    """)
    # Lightning 2.6.6 or torch 2.12, the lower bounds, import dynamo with what the lines above use.
    is_deferred = Version(version("torch")) >= Version("2.13")
    dynamo = [str(not is_deferred), "torch._dynamo.utils True module"]
    assert lines == ["False", "True True True", "2.0 accuracy", "Figure Axes", *dynamo]


@pytest.mark.slow
def test_compiled_modules_and_optimizers_work_after_a_deferred_import_of_dynamo():
    lines = run("""
        import sys
        from rl_modules.fast.imports import defer_imports
        defer_imports()
        import lightning, torch
        from lightning.pytorch.utilities.compile import OptimizedModule
        def step(network):
            optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
            network(torch.ones(1, 2, dtype=torch.float32, device="cpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return network.weight.tolist()
        def network():
            network = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.constant_(network.weight, 3.0)
            return network
        print(step(network()), "torch._dynamo.eval_frame" in sys.modules)
        disabled = torch.optim.Optimizer.zero_grad.__wrapped__
        print(disabled.__dynamo_disable is disabled)
        compiled = torch.compile(network(), backend="eager")
        print(isinstance(compiled, OptimizedModule), isinstance(network(), OptimizedModule))
        print(step(compiled), disabled.__dynamo_disable is disabled)
        print(torch._dynamo.OptimizedModule is type(compiled), torch._dynamo.explain.__name__)
    """)
    assert lines == ["[[2.0, 2.0]] False", "True", "True False", "[[2.0, 2.0]] False", "True explain"]


@pytest.mark.slow
def test_another_version_of_torchmetrics_may_need_its_whole_package_at_once():
    lines = run("""
        import rl_modules.fast.imports as deferred
        deferred.defer_imports()
        del deferred._EARLY["torchmetrics"]["_logger"]  # as if its files asked for a name that is not listed
        import lightning, torchmetrics
        from lightning.pytorch.core.module import Metric
        print(torchmetrics.Metric is Metric, issubclass(torchmetrics.Accuracy, Metric), type(torchmetrics).__name__)
    """)
    assert lines == ["True True module"]
