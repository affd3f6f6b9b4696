from server.api import API
from server.openai.chat.docs import ENDPOINTS
from server.openai.chat.handler import add_routes

api = API(add_routes, ENDPOINTS)
