"""Images of conversations: loaded in threads of their own, within the model's limits."""

from __future__ import annotations

from engine import ModelInfo
from engine.vision.decode import ImageError
from engine.vision.processors import ProcessedImage
from engine.vision.sources import ImageSource
from server.generation.errors import InvalidRequestError
from server.generation.request import Conversation
from server.generation.workers import Workers


async def load_images(
    model: ModelInfo, conversation: Conversation, workers: Workers, tenant: str
) -> list[ProcessedImage]:
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
    found: list[ProcessedImage] = []
    num_tokens = 0
    for number, source in enumerate(sources, 1):
        try:
            image = await _load(model, source, workers, tenant)
        except ImageError as error:
            raise InvalidRequestError(f"image {number}: {error}", "messages") from None
        found.append(image)
        num_tokens += image.num_tokens
        if num_tokens >= model.max_model_len:
            reason = (
                f"This model's maximum context length is {model.max_model_len} tokens. However, the first "
                f"{number} images have {num_tokens} tokens. Please send smaller or fewer images."
            )
            raise InvalidRequestError(reason, "messages", lead=None)
    return found


async def _load(model: ModelInfo, source: ImageSource, workers: Workers, tenant: str) -> ProcessedImage:
    loader = model.images
    assert loader is not None
    if not source.is_remote:
        return await workers.run_image(loader.load, source, tenant=tenant)
    data = await workers.run_download(loader.read, source, tenant=tenant)
    return await workers.run_image(loader.load_file, data, tenant=tenant)
