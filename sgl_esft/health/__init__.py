"""Is the server well, may it get work, and how does it end.

ranks, detokenizer --beat--> heartbeats --> readiness --> GET /readyz
                               '--> watch --> fault --> requests end with an error, exit 70
SIGTERM, SIGINT, POST /v1/drain --> service --> no new work --> all answered --> exit
"""
