from server.apis.api import API
from server.apis.openai.pooling.docs import ENDPOINTS
from server.apis.openai.pooling.handler import add_routes

api = API(add_routes, ENDPOINTS)
