from server.api import API
from server.openai.embeddings.docs import ENDPOINTS
from server.openai.embeddings.handler import add_routes

api = API(add_routes, ENDPOINTS)
