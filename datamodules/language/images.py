"""Images of records: found in their columns and messages, opened, and read by the model's processor."""

import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from datamodules.language.sources import refuse, short
from rl_modules.common.errors import UsageError
from rl_modules.language.text.records import Record, place_of
from rl_modules.language.vision import ImageReader, RowImages

#: Columns of images, and those of messages and texts in which parts stand for them.
_COLUMNS, _TALKS = ("images", "image"), ("prompt", "messages", "completion", "chosen", "rejected")
#: What stands for an image in a text, as in LLaVA's conversations.
MARK = "<image>"
#: Bytes of images that stay read.
KEPT = 2**28

Source = Any
Message = dict[str, Any]


def with_images(row: Record, place: str, folder: Path | None) -> Record:
    """A row with its images as the column ``images``, each a path, bytes or an image of PIL, and a part ``{"type":
    "image"}`` in a message for each, in the same order.

    Images that the messages do not place stand at :data:`MARK` in their texts, else before the first user's message.

    Args:
        row: of a file or dataset.
        place: for messages.
        folder: of the file, to which paths are relative; None: the working directory.

    Raises:
        UsageError: an image that is missing or damaged, or a number of images other than that of their places.
    """
    given = next((row[name] for name in _COLUMNS if row.get(name) is not None), None)
    listed = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    own = [part[key] for part in _parts(row) if _is_image(part) for key in ("image", "path", "url") if part.get(key)]
    images = [_plain(image, folder) for image in [*listed, *own]]
    for number, image in enumerate(images):
        try:
            opened(image)
        except Exception as error:  # PIL raises errors of many kinds of damaged files
            reason = " ".join(str(error).split()) or type(error).__name__
            raise refuse(place, "images", f"has no image in place {number}, {short(image)} ({reason})") from error
    row = {name: value for name, value in row.items() if name not in _COLUMNS}
    row = {name: _as_messages(name, value) if images and name in _TALKS else value for name, value in row.items()}
    if images and not any(map(_is_image, _parts(row))):
        talk = next((row[name] for name in ("prompt", "messages") if row.get(name)), None)
        first = next((m for m in talk or () if isinstance(m, dict) and m.get("role") == "user"), None)
        if first is None:
            raise refuse(place, "images", "belong to no user's message; give a prompt, or messages with one")
        first["content"] = [*({"type": "image"} for _ in images), *_as_parts(first["content"])]
    # The rejected answer is to the same prompt, which it may begin with.
    places = sum(map(_is_image, _parts({name: value for name, value in row.items() if name != "rejected"})))
    if places != len(images):
        raise refuse(
            place, "images", f"has {len(images)} images for {places} places in the messages; give one for each"
        )
    return {**row, "images": images}


def opened(source: Source) -> Image.Image:
    """Opens an image, whole, in red, green and blue."""
    image = source if isinstance(source, Image.Image) else None
    if image is None:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    return image.convert("RGB")


class RecordImages:
    """The images of records as the model's tensors; those that were read last are kept."""

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        # By the identity of a record's list of images, which its copies share; it is kept alive with what was read.
        self._read: OrderedDict[int, tuple[Any, RowImages, list[str]]] = OrderedDict()
        self._size = 0

    def of(self, record: Record) -> RowImages:
        """The tensors of a record's images."""
        return self._found(record)[1]

    def texts(self, record: Record) -> list[str]:
        """The texts that stand for a record's images."""
        return self._found(record)[2]

    def _found(self, record: Record) -> tuple[Any, RowImages, list[str]]:
        images = record.get("images") or []
        if (known := self._read.get(id(images))) is not None:
            self._read.move_to_end(id(images))
            return known
        if not images:
            return images, RowImages({}), []
        try:
            found = (images, *self.reader.read([opened(image) for image in images]))
        except (OSError, ValueError, TypeError) as error:
            place = place_of(record, "a record")
            raise UsageError(
                f"{place}: the processor can't read its images ({' '.join(str(error).split())})"
            ) from error
        self._read[id(images)] = found
        self._size += _bytes(found[1])
        while self._size > KEPT and len(self._read) > 1:
            self._size -= _bytes(self._read.popitem(last=False)[1][1])
        return found


def _bytes(images: RowImages) -> int:
    return sum(x.numel() * x.element_size() for x in images.fields.values())


def _plain(image: Any, folder: Path | None) -> Source:
    """An image as a path, bytes, or an image of PIL; ``datasets`` gives dictionaries of bytes and path."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        return str((folder or Path()) / image)
    return image


def _parts(row: Mapping[str, Any]) -> list[Any]:
    """The parts of all messages of a row."""
    talks = [row[name] for name in _TALKS if isinstance(row.get(name), list)]
    contents = [m.get("content") for talk in talks for m in talk if isinstance(m, dict)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _as_messages(name: str, talk: Any) -> Any:
    """Messages with plain parts for images; a prompt that is a text becomes a user's message."""
    if isinstance(talk, str) and name == "prompt":
        talk = [{"role": "user", "content": talk}]
    if not isinstance(talk, list) or not all(isinstance(message, dict) for message in talk):
        return talk
    return [{**message, "content": _marked(message.get("content"))} for message in talk]


def _marked(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "image"} if _is_image(part) else part for part in content]
    if not isinstance(content, str) or MARK not in content:
        return content
    pieces = [{"type": "text", "text": text} for text in content.split(MARK)]
    placed = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
    return [part for part in placed if part.get("text") != ""]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
