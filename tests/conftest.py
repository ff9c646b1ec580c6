"""Shared by all tests: one thread, quiet Lightning, and a trainer that writes nowhere."""

# ruff: noqa: E402
import functools
import gc
import logging
import os
import sys
from types import SimpleNamespace

# Read when the libraries below are imported. A model's name that is no directory is refused at once, instead of after
# 45 s of trying a hub that can't be reached.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rl_modules import fast
from tests import twins

NOTES = twins.Notes(os.environ["RL_REACHED"]) if "RL_REACHED" in os.environ and fast.is_fast() else None
if NOTES is not None:
    fast.is_fast = NOTES.is_fast  # before others import it

# isort: split
from rl_modules.fast.imports import defer_imports

defer_imports()  # before the first import of Lightning

# isort: split
import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, settings
from lightning.fabric.utilities import registry
from lightning.pytorch.utilities import model_helpers

# The same examples in every run, and no judgement of how fast a busy machine is.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so in the processes that tests start
if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
    constants.HF_HUB_OFFLINE = True  # a pytest plugin may have imported it before the variable was set
# Tests fork, and a child waits for ever for OpenMP threads that only its parent had: whatever a config says, one.
torch.set_num_threads = lambda _: None
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
for handler in logging.getLogger("lightning.pytorch").handlers:
    handler.setStream(sys.__stderr__)  # not what captures while this file is imported
# Every Trainer looks for callbacks of other packages in the metadata of all: a seventh of a short fit.
registry.entry_points = functools.cache(registry.entry_points)
# `load_from_checkpoint` reads the source of all callers, to know whether TorchScript is one: longer than the loading.
model_helpers.inspect = SimpleNamespace(stack=list)


def pytest_configure(config):
    """Hides Lightning's advice about loader workers."""
    config.addinivalue_line("filterwarnings", "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """What is `long` is `slow` too; a case that was slow already is not `long`, and has half an hour. With RL_FAST=0
    there is no fast path to test.
    """
    timeouts = config.pluginmanager.hasplugin("timeout")
    for item in items:
        if os.environ.get("RL_FAST") == "0" and item.get_closest_marker("fast_path"):
            item.add_marker(pytest.mark.skip(reason="tests a fast path itself, and RL_FAST=0 runs its plain twin"))
        if item.get_closest_marker("slow"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "long"]
            if timeouts and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1800))
        elif item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    if "RL_REACHED" in os.environ and NOTES is None:
        reached = twins.chosen(os.environ["RL_REACHED"])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in reached])
        items[:] = [item for item in items if item.nodeid in reached]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if NOTES is None:
        return (yield)
    NOTES.was_asked = False
    result = yield
    NOTES.write(item)
    return result


def pytest_collection_finish():
    """Collects what the imports made no more, and the rest less often: each was seven per cent of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1_000)


@pytest.fixture
def make_trainer(tmp_path):
    """A CPU trainer without bar, logger or checkpoints unless asked for."""

    def make(**kwargs):
        defaults = {
            "accelerator": "cpu",
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(**{**defaults, **kwargs})

    return make
