from server.api import API, OwnErrors
from server.ollama.docs import ENDPOINTS
from server.ollama.errors import ERROR_SCHEMA, error_body
from server.ollama.handler import PATHS, add_routes

api = API(add_routes, ENDPOINTS, OwnErrors(PATHS, error_body, "OllamaError", ERROR_SCHEMA))
