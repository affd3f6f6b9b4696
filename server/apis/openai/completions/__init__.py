from server.apis.api import API
from server.apis.openai.completions.docs import ENDPOINTS
from server.apis.openai.completions.handler import add_routes

api = API(add_routes, ENDPOINTS)
