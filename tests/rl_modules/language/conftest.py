"""Tests of the fast paths themselves run them, whatever ``RL_FAST`` says."""

import pytest

#: Modules that test fast paths; elsewhere those tests do that pack texts.
OF_FAST_PATHS = ("test_fast_paths", "test_logits", "test_self_check", "test_shared_scoring",
                 "test_tiled_head", "test_varlen")  # fmt: skip


@pytest.fixture(autouse=True)
def fast_paths_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = request.module.__name__.rpartition(".")[2]
    packs = getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("packing") is True
    if module in OF_FAST_PATHS or packs or "pack" in request.node.name:
        monkeypatch.setenv("RL_FAST", "1")
