"""Images of records: what is read, in every form that datasets have, and what is refused by its record's number."""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from datamodules.language import load_records
from datamodules.language.images import opened
from datamodules.language.instruction import InstructionDataModule
from datamodules.language.preference import PreferenceDataModule
from rl_modules import SFT, RewardModel
from rl_modules.common.errors import UsageError
from tests.rl_modules.language.vision.models import make, without_videos  # noqa: F401
from tests.training import fit

PIXELS = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
SHOWN = Image.fromarray(PIXELS)


def as_bytes(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parts(record):
    return [part["type"] for part in record["prompt"][0]["content"]]


def test_files_are_named_relative_to_their_rows_file(tmp_path):
    (tmp_path / "images").mkdir()
    SHOWN.save(tmp_path / "images" / "a.png")
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "path": "images/a.png"}]}]
    rows = [
        {"prompt": "what?", "image": "images/a.png"},
        {"prompt": "<image> or <image>?", "images": ["images/a.png", {"bytes": None, "path": "images/a.png"}]},
        {"prompt": talk},
    ]
    records = load_records(path=written(tmp_path, *rows))
    assert [parts(r) for r in records] == [["image", "text"], ["image", "text", "image", "text"], ["text", "image"]]
    assert [len(r["images"]) for r in records] == [1, 2, 1]
    assert all(np.array_equal(np.asarray(opened(image)), PIXELS) for r in records for image in r["images"])


def test_image_features_bytes_and_objects_are_the_same_picture(tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "images": [[SHOWN], [SHOWN, SHOWN]]})
    as_feature = rows.cast_column("images", datasets.List(datasets.Image()))
    as_feature.to_parquet(tmp_path / "rows.parquet")
    for source in ({"dataset": as_feature}, {"path": tmp_path / "rows.parquet"}):
        records = load_records(**source)
        assert [len(record["images"]) for record in records] == [1, 2]
        assert all(np.array_equal(np.asarray(opened(x)), PIXELS) for record in records for x in record["images"])
    assert np.array_equal(np.asarray(opened(as_bytes(SHOWN))), PIXELS)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "image": "missing.png"}, "rows.jsonl:2: 'images' has no image in place 0"),
        ({"prompt": "a", "image": "damaged.png"}, "rows.jsonl:2: 'images' has no image in place 0"),
        ({"prompt": "<image><image>", "image": "a.png"}, "rows.jsonl:2: 'images' has 1 images for 2 places"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "has 0 images for 1 places"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "has the part dict {'type': 'video'}"),
    ],
)
def test_a_record_without_its_image_is_refused_by_its_line(row, said, tmp_path):
    SHOWN.save(tmp_path / "a.png")
    (tmp_path / "damaged.png").write_bytes(as_bytes(SHOWN)[:60])
    with pytest.raises(UsageError, match=said.replace("{", r"\{")):
        load_records(path=written(tmp_path, {"prompt": "a", "image": "a.png"}, row))


@pytest.mark.long
@pytest.mark.usefixtures("without_videos")
def test_refuses_images_where_they_can_not_be_learned_from(tmp_path):
    SHOWN.save(tmp_path / "a.png")
    path = str(written(tmp_path, {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c", "image": "a.png"}))
    data = InstructionDataModule(path=path, batch_size=1, eval_steps=0)
    with pytest.raises(UsageError, match="has no processor that can be read"):
        fit(SFT(str(tmp_path)), data, max_steps=1)
    model = make("llava", tmp_path / "model")
    with pytest.raises(UsageError, match="RewardModel does not learn"):
        fit(RewardModel(str(model)), PreferenceDataModule(path=path, batch_size=1, eval_steps=0), max_steps=1)
