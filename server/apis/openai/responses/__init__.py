from server.apis.api import API
from server.apis.openai.responses.docs import ENDPOINTS
from server.apis.openai.responses.handler import add_routes

api = API(add_routes, ENDPOINTS)
