from server.apis.api import API
from server.apis.openai.generate.docs import ENDPOINTS
from server.apis.openai.generate.handler import add_routes

api = API(add_routes, ENDPOINTS)
