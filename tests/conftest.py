from hypothesis import HealthCheck, Phase, settings

quick = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("shrink", **quick)
settings.register_profile("regard", **quick, phases=(Phase.explicit, Phase.generate))
settings.load_profile("regard")
