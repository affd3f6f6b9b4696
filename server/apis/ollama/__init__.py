from server.apis.api import API, OwnErrors
from server.apis.ollama.docs import ENDPOINTS
from server.apis.ollama.errors import ERROR_SCHEMA, error_body
from server.apis.ollama.handler import PATHS, add_routes

api = API(add_routes, ENDPOINTS, OwnErrors(PATHS, error_body, "OllamaError", ERROR_SCHEMA))
