from server.apis.api import API
from server.apis.openai.scores.docs import ENDPOINTS
from server.apis.openai.scores.handler import add_routes

api = API(add_routes, ENDPOINTS)
