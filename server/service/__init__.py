from server.api import API
from server.service.docs import ENDPOINTS
from server.service.handler import add_routes

api = API(add_routes, ENDPOINTS)
