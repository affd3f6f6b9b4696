from server.apis.anthropic.docs import ENDPOINTS
from server.apis.anthropic.errors import ERROR_SCHEMA, error_body
from server.apis.anthropic.handler import add_routes
from server.apis.api import API, OwnErrors

api = API(add_routes, ENDPOINTS, OwnErrors(("/v1/messages",), error_body, "AnthropicError", ERROR_SCHEMA))
