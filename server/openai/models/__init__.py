from server.api import API
from server.openai.models.docs import ENDPOINTS
from server.openai.models.handler import add_routes

api = API(add_routes, ENDPOINTS)
