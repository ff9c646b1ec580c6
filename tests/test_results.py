"""The table of results is that of the configs as they are."""

from pathlib import Path

import pytest
import yaml

from benchmarks import results
from recipes import configs

STORED = [row for row in results.ROWS.values() if results.load(row)]


@pytest.mark.parametrize("row", STORED, ids=lambda row: row.config)
def test_stored_runs_had_the_settings_of_their_config(row: results.Row) -> None:
    assert (results.STORE / row.config / "settings.yaml").exists()
    results.check_settings(row)


def test_a_seed_of_other_settings_is_not_run_beside_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = results.ROWS["ppo/cartpole"]
    monkeypatch.setattr(results, "STORE", tmp_path)
    results.check_settings(row)  # nothing is stored
    stored = yaml.safe_load(configs.text(row.config))
    kept = tmp_path / row.config / "settings.yaml"
    kept.parent.mkdir(parents=True)
    stored["trainer"]["accelerator"] = "cuda"
    kept.write_text(yaml.safe_dump(stored), encoding="utf-8")
    results.check_settings(row)
    stored["model"]["init_args"]["gamma"] = 0.5
    kept.write_text(yaml.safe_dump(stored), encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"ppo/cartpole holds runs of other settings than configs/ppo/cartpole.yaml"):
        results.run_seed(row, 0)
