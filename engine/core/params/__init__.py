"""Request parameters, declared once; checks, HTTP schema and documentation follow from them."""
