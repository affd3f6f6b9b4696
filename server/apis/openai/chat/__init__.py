from server.apis.api import API
from server.apis.openai.chat.docs import ENDPOINTS
from server.apis.openai.chat.handler import add_routes

api = API(add_routes, ENDPOINTS)
