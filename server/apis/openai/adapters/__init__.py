from server.apis.api import API
from server.apis.openai.adapters.docs import ENDPOINTS
from server.apis.openai.adapters.handler import add_routes

api = API(add_routes, ENDPOINTS)
