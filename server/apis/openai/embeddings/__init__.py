from server.apis.api import API
from server.apis.openai.embeddings.docs import ENDPOINTS
from server.apis.openai.embeddings.handler import add_routes

api = API(add_routes, ENDPOINTS)
