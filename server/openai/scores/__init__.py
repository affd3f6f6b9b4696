from server.api import API
from server.openai.scores.docs import ENDPOINTS
from server.openai.scores.handler import add_routes

api = API(add_routes, ENDPOINTS)
