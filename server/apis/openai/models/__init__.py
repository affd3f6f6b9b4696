from server.apis.api import API
from server.apis.openai.models.docs import ENDPOINTS
from server.apis.openai.models.handler import add_routes

api = API(add_routes, ENDPOINTS)
