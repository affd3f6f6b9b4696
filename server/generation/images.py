"""Images of conversations: loaded in threads of their own, within the model's limits."""

from __future__ import annotations

from engine import ModelInfo
from engine.core.fairness.tenants import group_of
from engine.vision.decode import ImageError
from engine.vision.loader import Picture, images_in
from engine.vision.sources import ImageSource
from server.generation.errors import BusyError, InvalidRequestError
from server.generation.request import Conversation
from server.generation.workers import Workers

RETRY_SECONDS = 5


async def load_images(model: ModelInfo, conversation: Conversation, workers: Workers, tenant: str) -> list[Picture]:
    """Return the images of a conversation, in order. Raises `RequestError`, which names the image that is at fault.

    No more are loaded than the context holds.
    """
    sources = [source for message in conversation.messages for source in message.images]
    if not sources:
        return []
    if (loader := model.images) is None:
        reason = "This model, as it is served here, reads text only: leave the images out."
        raise InvalidRequestError(reason, "messages", lead=None)
    try:
        loader.check_count(len(sources))
    except ImageError as error:
        raise InvalidRequestError(str(error), "messages") from None
    found: list[Picture] = []
    try:
        await _load_all(model, sources, found, workers, tenant)
    finally:
        loader.held.add(group_of(tenant), -sum(image.num_bytes for image in found))
    return found


async def _load_all(
    model: ModelInfo, sources: list[ImageSource], found: list[Picture], workers: Workers, tenant: str
) -> None:
    """Add the images to `found`, whose memory the caller then holds. Raises `RequestError`."""
    assert model.images is not None
    num_tokens = 0
    for number, source in enumerate(sources, 1):
        if not model.images.held.may_take(group_of(tenant), model.images.max_held_bytes):
            reason = "the images of unfinished requests fill the memory for them, or your part of it: try again"
            raise BusyError(reason, RETRY_SECONDS)
        try:
            image = await _load(model, source, workers, tenant)
        except ImageError as error:
            kind = "video" if source.is_video else "image"
            raise InvalidRequestError(f"{kind} {number}: {error}", "messages") from None
        found.append(image)
        model.images.held.add(group_of(tenant), image.num_bytes)
        num_tokens += sum(each.num_tokens for each in images_in([image]))
        if num_tokens >= model.max_model_len:
            reason = (
                f"This model's maximum context length is {model.max_model_len} tokens. However, the first "
                f"{number} images have {num_tokens} tokens. Please send smaller or fewer images."
            )
            raise InvalidRequestError(reason, "messages", lead=None)


async def _load(model: ModelInfo, source: ImageSource, workers: Workers, tenant: str) -> Picture:
    loader = model.images
    assert loader is not None
    if not source.is_remote:
        return await workers.run_image(loader.load, source, tenant=tenant)
    data = await workers.run_download(loader.read, source, tenant=tenant)
    return await workers.run_image(loader.load_read, source, data, tenant=tenant)
