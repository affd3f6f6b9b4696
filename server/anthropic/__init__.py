from server.anthropic.docs import ENDPOINTS
from server.anthropic.errors import ERROR_SCHEMA, error_body
from server.anthropic.handler import add_routes
from server.api import API, OwnErrors

api = API(add_routes, ENDPOINTS, OwnErrors(("/v1/messages",), error_body, "AnthropicError", ERROR_SCHEMA))
