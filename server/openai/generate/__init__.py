from server.api import API
from server.openai.generate.docs import ENDPOINTS
from server.openai.generate.handler import add_routes

api = API(add_routes, ENDPOINTS)
