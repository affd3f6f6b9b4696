from server.api import API
from server.openai.responses.docs import ENDPOINTS
from server.openai.responses.handler import add_routes

api = API(add_routes, ENDPOINTS)
