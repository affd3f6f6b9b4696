from server.api import API
from server.openai.completions.docs import ENDPOINTS
from server.openai.completions.handler import add_routes

api = API(add_routes, ENDPOINTS)
