"""From traffic, objectives and prices to a fleet."""

from loadgen.recommend.recommend import Progress, Recommendation, recommend
from loadgen.recommend.request import Request, RequestError, load_request, parse_request

__all__ = ["Progress", "Recommendation", "Request", "RequestError", "load_request", "parse_request", "recommend"]
