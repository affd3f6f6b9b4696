"""Images in prompts: encodes those whose tokens a step computes, and gives their tokens positions of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.core.batch import MAX_ENCODED_TOKENS, ScheduledBatch
from engine.core.engine_request import ImageInput
from engine.models.decoder import Decoder, ImageTokens
from engine.models.residual import ImageSpan
from engine.models.rope import sectioned_rows
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import EncodedImages
from engine.worker.device import Device, Stopwatch
from engine.worker.input_batch import InputBatch, PackedStep, Row

ENCODED_PATCHES = 65_536  # the most that are encoded at once, or those of a single larger image
# How many results of an MLP's inner width are held at once, by kind; others hold two.
MLP_COPIES = {"qwen2.5": 3, "glm": 3, "pixtral": 4, "gemma4": 5, "gemma4_unified": 4}


class StepImages(NamedTuple):
    """The tokens of a step that need more than their ids and indices."""

    tokens: ImageTokens | None  # None: none stands for an image, or this stage needs to know of none
    positioned: Tensor | None  # [m] int64: tokens of the step whose rows of the RoPE tables the step has written
    first_row: int  # of these rows

    def place(self, positions: Tensor) -> None:
        """Let positions [T] name the rows."""
        if self.positioned is None:
            return
        rows = torch.arange(len(self.positioned), dtype=positions.dtype, device=positions.device)
        positions.index_copy_(0, self.positioned, rows + self.first_row)


class ImageReader:
    """Reads images for one rank. The last `own_rows` rows of the model's RoPE tables belong to it.

    Encoded images are kept by their content, so that those of several chunks or requests are encoded once, until the
    scheduler lets them be forgotten (`EncoderCache`).
    """

    def __init__(self, model: Decoder, device: Device, own_rows: int) -> None:
        assert model.spec.vision is not None
        self._model, self._spec, self._device = model, model.spec.vision, device
        self._first_row = min((len(table) for table in model.rope_tables.values()), default=0) - own_rows
        self._encoded: dict[str, EncodedImages] = {}  # by digest
        self._stopwatch: Stopwatch | None = None  # of the last step's encoder

    def shift_of(self, images: Sequence[ImageInput]) -> int:
        """Return how many positions more than tokens a prompt with these images takes: usually a negative number."""
        if self._spec.rope_sections is None:
            return 0
        if not images:
            return 0
        *_, (_, _, end) = image_places(images, self._spec.merge_size)
        return end - images[-1].stop

    def has_part(self, rows: InputBatch, batch: ScheduledBatch) -> bool:
        """Return whether the batch computes tokens up to the last image of one of its requests."""
        members = rows.members(batch)
        return members.has_images and any(computes_images(row, rows.num_computed(row)) for row in members.rows)

    def step(self, packed: PackedStep) -> StepImages:
        """Encode what a step needs. Its requests with images compute tokens up to the last one."""
        start_of, members = packed.members.query_start, packed.members
        positions: list[np.ndarray] = []
        positioned: list[np.ndarray] = []
        spans: list[ImageSpan] = []
        only_windows = self._spec.sees_both_ways == "windows"
        shown: list[tuple[ImageInput, slice, int]] = []  # image, those of its tokens, place of the first in the step
        for i, row in enumerate(members.rows):
            stop, first = int(packed.context_lens[i]), int(start_of[i])
            start = stop - int(members.query_lens[i])
            if not computes_images(row, start):
                continue
            if self._spec.rope_sections is not None:
                positions.append(token_positions(row.images, self._spec.merge_size, start, stop))
                positioned.append(np.arange(first, first + stop - start))
            for image in row.images:
                low, high = max(image.start, start), min(image.stop, stop)
                if low < high:
                    shown.append((image, slice(low - image.start, high - image.start), first + low - start))
                    if image.sees_both_ways and high - low > 1:
                        assert high == image.stop, "no step ends within an image whose tokens see each other"
                        spans.append(ImageSpan(i, first + low - start, low, high, only_windows))
        tokens = self._tokens(shown, spans) if shown and self._model.stage.is_first else None
        if tokens is None and spans:
            tokens = ImageTokens(spans=spans)
        if self._spec.rope_sections is None:
            return StepImages(tokens, None, self._first_row)
        self._write_rows(self._spec.rope_sections, np.concatenate(positions, 1))
        own = self._device.upload(torch.from_numpy(np.concatenate(positioned)))
        return StepImages(tokens, own, self._first_row)

    def _write_rows(self, sections: Sequence[int], positions: np.ndarray) -> None:
        """Write the rows of the RoPE tables for tokens at these times, rows and columns [3, m]."""
        on_device = self._device.upload(torch.from_numpy(positions))
        for rope, table in self._model.rope_tables.items():
            rows = sectioned_rows(rope, sections, on_device, interleaved=self._spec.rope_interleaved)
            table[self._first_row :][: on_device.shape[1]] = rows

    def _tokens(self, shown: Sequence[tuple[ImageInput, slice, int]], spans: Sequence[ImageSpan]) -> ImageTokens:
        encoded = self._encode({image.digest: image for image, _, _ in shown}.values())
        indices, embeddings = [], []
        deepstack: list[list[Tensor]] = [[] for _ in self._spec.deepstack]
        for image, part, at in shown:
            offsets, rows = encoded_tokens(self._spec, image.grid, part)
            indices.append(torch.from_numpy(offsets + at))
            embeddings.append(encoded[image.digest].embeddings[rows])
            for found, layer in zip(deepstack, encoded[image.digest].deepstack, strict=True):
                found.append(layer[rows])
        on_device = self._device.upload(torch.cat(indices))
        return ImageTokens(on_device, torch.cat(embeddings), [torch.cat(layer) for layer in deepstack], spans)

    def _encode(self, images: Iterable[ImageInput]) -> dict[str, EncodedImages]:
        """Return the encoded images by digest."""
        found: dict[str, EncodedImages] = {}
        missing: list[ImageInput] = []
        for image in images:
            if (known := self._encoded.get(image.digest)) is None:
                missing.append(image)
            else:
                found[image.digest] = known
        if not missing:
            return found
        self._stopwatch = self._device.stopwatch()
        for group in groups_of(missing, most_patches(self._spec)):
            for image, encoded in zip(group, self._run(group), strict=True):
                found[image.digest] = self._encoded[image.digest] = encoded
        self._stopwatch.stop()
        return found

    def take_stopwatch(self) -> Stopwatch | None:
        """Return what measured the encoder in the step that was just queued; None: it encoded nothing."""
        stopwatch, self._stopwatch = self._stopwatch, None
        return stopwatch

    def _run(self, images: Sequence[ImageInput]) -> list[EncodedImages]:
        vision, side = self._model.vision, self._spec.patch_size
        assert vision is not None
        data = [np.frombuffer(each.patches, np.uint8).reshape(each.num_frames, -1, 3, side, side) for each in images]
        together = np.concatenate(data, 1)
        patches = self._device.upload(torch.from_numpy(together[0] if len(together) == 1 else together))
        encoded = vision(patches, [image.grid for image in images])
        counts = [math.prod(image.grid) // self._spec.merge_size**2 for image in images]
        of_layers = [each.split(counts) for each in encoded.deepstack]
        parts = encoded.embeddings.split(counts)
        # Each image owns its memory, so that it is freed with it.
        return [EncodedImages(part.clone(), [layer[i].clone() for layer in of_layers]) for i, part in enumerate(parts)]

    def reserve(self) -> None:
        """Take as much memory as encoded images may have, and as encoding needs for a moment."""
        vision, stage = self._model.vision, self._model.stage
        if vision is None or not stage.is_first:
            return
        most = most_patches(self._spec)
        rows = math.isqrt(most)
        grids, patch = [(rows, most // rows)], self._spec.patch_size
        if (tile := self._spec.tile) is not None:
            grids = [tile] * max(most // math.prod(tile), 1)
        device = next(vision.parameters()).device
        patches = torch.zeros(sum(map(math.prod, grids)), 3, patch, patch, dtype=torch.uint8, device=device)
        with vision.few_layers():
            self._encoded[""] = vision(patches, grids)

    def forget(self, digests: Iterable[str]) -> None:
        """Forget these encoded images."""
        for digest in digests:
            self._encoded.pop(digest, None)

    def clear(self) -> None:
        """Forget all encoded images."""
        self._encoded.clear()


def encoded_tokens(vision: VisionSpec, grid: Grid, part: slice) -> tuple[np.ndarray, slice]:
    """Return which tokens of a part of an image's tokens the encoder computes, counted from the part's first [n] int64,
    and which of the encoder's rows they are.
    """
    offsets = np.arange(part.start, part.stop)
    if vision.row_ends is None:
        return offsets - part.start, part
    stride = grid[1] // vision.merge_size + 1  # each row ends with a token of the text model
    found = offsets[offsets % stride != stride - 1]
    first = part.start - part.start // stride
    return found - part.start, slice(first, first + len(found))


def computes_images(row: Row, start: int) -> bool:
    """Return whether a chunk of a request that begins at `start` has tokens up to its last image."""
    return bool(row.images) and start < row.images[-1].stop


def image_places(images: Iterable[ImageInput], merge_size: int) -> Iterator[tuple[ImageInput, int, int]]:
    """Yield each image with the position of its first row and column, and that of the text behind it: the first one
    that no token so far has. The pairs of frames of a video without texts stand at the same rows and columns.
    """
    index = first = end = 0
    follows = False  # the image before it belongs to such a video
    for image in images:
        if not (follows and image.moment is not None and image.start == index):
            first = end + image.start - index
        end = max(end, first + max(*(count // merge_size for count in image.grid), (image.moment or 0) + 1))
        index, follows = image.stop, image.moment is not None
        yield image, first, end


def token_positions(images: Sequence[ImageInput], merge_size: int, start: int, stop: int) -> np.ndarray:
    """Return time, row and column of the tokens from index `start` to `stop` of a prompt: [3, stop - start] int64.

    The three are equal for text. An image stands at one time; its rows and columns count from there.
    """
    parts: list[np.ndarray] = []
    index = position = 0
    for image, first, end in image_places(images, merge_size):
        rows, columns = (count // merge_size for count in image.grid)
        parts.append(np.broadcast_to(np.arange(position, position + image.start - index), (3, image.start - index)))
        row, column = np.divmod(np.arange(rows * columns), columns)
        parts.append(np.stack([np.full_like(row, image.moment or 0), row, column]) + first)
        position, index = end, image.stop
    rest = max(stop - index, 0)
    parts.append(np.broadcast_to(np.arange(position, position + rest), (3, rest)))
    return np.ascontiguousarray(np.concatenate(parts, 1)[:, start:stop])


def most_patches(vision: VisionSpec) -> int:
    """Return how many patches are encoded at once: no more than are kept."""
    return min(ENCODED_PATCHES, MAX_ENCODED_TOKENS * vision.merge_size**2)


def groups_of(images: Sequence[ImageInput], most: int) -> Iterable[list[ImageInput]]:
    """Group images that are encoded at once, of as many frames: together at most `most` patches, or a single one. In
    deterministic mode each is encoded alone, so that the others change no bit of it.
    """
    group: list[ImageInput] = []
    for image in images:
        if group and kernels.FORMS.deterministic:
            yield group
            group = []
        is_large = sum(math.prod(each.grid) for each in (*group, image)) > most
        if group and (is_large or image.num_frames != group[0].num_frames):
            yield group
            group = []
        group.append(image)
    if group:
        yield group


def image_bytes(vision: VisionSpec, hidden_size: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the encoded images that are kept, and an estimate of those that encoding needs."""
    kept = MAX_ENCODED_TOKENS * hidden_size * itemsize * (1 + len(vision.deepstack))
    held = MLP_COPIES.get("qwen2.5" if vision.is_older else vision.kind, 2)
    widest = vision.hidden_size * 4 + max(vision.hidden_size * 6, vision.intermediate_size * held)
    return kept, most_patches(vision) * widest * itemsize


def own_rows(vision: VisionSpec | None, max_tokens: int) -> int:
    """Return how many rows of the RoPE tables steps of `max_tokens` tokens write."""
    return 0 if vision is None or vision.rope_sections is None else max_tokens
