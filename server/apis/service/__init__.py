from server.apis.api import API
from server.apis.service.docs import ENDPOINTS
from server.apis.service.handler import add_routes

api = API(add_routes, ENDPOINTS)
