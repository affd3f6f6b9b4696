"""API reference of the endpoints about the server."""

from __future__ import annotations

from engine import __version__
from server.apis.endpoint import Endpoint

TAG = "Service"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/requests/{request_id}/abort",
        TAG,
        "End a request",
        "By the `id` of its answer; a request may choose the end of that itself, as `request_id`. Its client gets what "
        "there is, with the `finish_reason` `abort`.",
        answer={"id": "chatcmpl-2f1b", "aborted": True},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/requests/{request_id}",
        TAG,
        "Where a request's time went",
        "By the `id` of its answer, or its `X-Request-Id`, while it runs and some time after. `seconds` of a choice "
        "are those of "
        "each stage that is over. `prefix_miss` says why no more of the prompt was taken from the prefix cache: "
        "`other_tokens`: other prompts went on differently after `cached_tokens`; `not_seen`: none went on there; "
        "`evicted`: it held `known_tokens` of the prompt once; `no_state`: of recurrent layers; "
        "`other_salt`: the same start was last sent with another "
        "`cache_salt` or LoRA adapter; `disabled`; or `not_read` where each token of the prompt has a result of its "
        "own; null: all of it was.",
        answer={
            "id": "chatcmpl-2f1b",
            "x_request_id": "5d0f",
            "key": "alice",
            "model": "MODEL",
            "created": 1760000000.125,
            "status": "finished",
            "seconds": 1.307,
            "num_images": 1,
            "image_tokens": 704,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "prompt_tokens": 812,
                    "cached_tokens": 768,
                    "prefix_miss": "other_tokens",
                    "known_tokens": 768,
                    "completion_tokens": 120,
                    "num_draft_tokens": 60,
                    "num_accepted_draft_tokens": 52,
                    "num_preemptions": 0,
                    "seconds": {"preparation": 0.002, "queue": 0.013, "prefill": 0.041, "decode": 1.25},
                }
            ],
        },
        statuses=(403, 404),
    ),
    Endpoint(
        "GET",
        "/requests",
        TAG,
        "The newest requests",
        "Those of the key; for a key with `admin: true`, those of all keys. `?key=NAME`: those of one key.",
        answer={"object": "list", "data": []},
        statuses=(403,),
    ),
    Endpoint(
        "GET",
        "/load",
        TAG,
        "How busy the server is",
        "`server_load`: requests that are being answered. Also as `/v1/load`.",
        answer={
            "server_load": 3,
            "num_requests_running": 2,
            "num_requests_waiting": 1,
            "kv_cache_usage": 0.25,
            "num_blocks": 1000,
            "num_free_blocks": 750,
        },
    ),
    Endpoint("GET", "/v1/load", TAG, "How busy the server is", answer={"server_load": 3}),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        TAG,
        "Empty the prefix cache",
        "Later prompts are computed anew. 409 while requests are running. Requires a key with `admin: true`, if the "
        "server requires keys.",
        answer={"reset": True},
        statuses=(403, 409, 503),
    ),
    Endpoint(
        "POST",
        "/sleep",
        TAG,
        "Free the model's memory for a time",
        "As in vLLM. `?level=1`, the default: the KV cache is freed and the weights move to host memory; `?level=2`: "
        "the weights are dropped, and loaded again by `/wake_up`. `?mode=abort`, the default, ends running requests, "
        "`?mode=wait` waits for them. Until `/wake_up`, requests for the model get a 503. With several ranks, level 2 "
        "only. With several models `?model=NAME`; requests wake it up then. Requires a key with `admin: true`, if the "
        "server requires keys.",
        text="",
        statuses=(400, 403, 503),
    ),
    Endpoint(
        "POST",
        "/wake_up",
        TAG,
        "End the sleep",
        "The response follows once the model takes requests. 503 if its memory is in use; the model still sleeps then. "
        "Requires a key with `admin: true`, if the server requires keys.",
        text="",
        statuses=(403, 503),
    ),
    Endpoint(
        "POST",
        "/v1/weights",
        TAG,
        "Replace the model's weights",
        "`?path=FOLDER`: a folder on the server with weights of the same model, such as the next step of a training "
        "run. `?mode=wait`, the default, waits for running requests, `?mode=abort` ends them. Until the response, new "
        "requests get a 503. The prefix cache is emptied. 409 if the folder cannot be used; the weights of before stay "
        "then. `version` counts the replacements. Requires a key with `admin: true`, if the server requires keys.",
        answer={"path": "/models/step-200", "version": 1},
        statuses=(400, 403, 409, 503),
    ),
    Endpoint(
        "GET",
        "/v1/weights",
        TAG,
        "The folder of the model's weights",
        "Requires a key with `admin: true`, if the server requires keys.",
        answer={"path": "/models/step-200", "version": 1},
        statuses=(403,),
    ),
    Endpoint("GET", "/is_sleeping", TAG, "Whether the model sleeps", answer={"is_sleeping": False}),
    Endpoint("GET", "/livez", TAG, "Whether the process answers", "The body is empty.", text=""),
    Endpoint(
        "GET",
        "/readyz",
        TAG,
        "Whether requests are worked on",
        "503 with `Retry-After` while the engine starts, is started again or does not respond, and while the server "
        "stops. "
        "`phase`: `starting`, `downloading`, `loading`, `profiling`, `compiling`, `capturing`, `ready`, `asleep`, "
        "`restarting`, `unresponsive`, `dead`, `draining`; `fraction`: how much of it is done; "
        "`seconds_left`: an estimate; `last_loss`: why the engine process was lost last. With "
        "`Accept: text/event-stream` an event for each change, until one that is final.",
        answer={"phase": "ready", "fraction": None, "seconds_left": None, "num_restarts": 0, "last_loss": None},
        statuses=(503,),
    ),
    Endpoint(
        "GET",
        "/health",
        TAG,
        "The same as vLLM has it",
        "But 200 also while the model sleeps. "
        "The body is empty, unless JSON is asked for (`Accept: application/json`).",
        text="",
        statuses=(503,),
    ),
    Endpoint("GET", "/ping", TAG, "The same", text="", statuses=(503,)),
    Endpoint("POST", "/ping", TAG, "The same", text="", statuses=(503,)),
    Endpoint("GET", "/version", TAG, "The server's version", answer={"version": __version__}),
    Endpoint(
        "GET",
        "/metrics",
        TAG,
        "Counters for Prometheus",
        "Under vLLM's names. By API key only for a key with `admin: true`; any other key sees its own usage.",
        text='vllm:num_requests_running{engine="0",model_name="MODEL"} 2.0\n',
    ),
)
