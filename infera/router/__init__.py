"""From a rendered request to a placement: load model, predicted cost, policies. No input or output in here."""
