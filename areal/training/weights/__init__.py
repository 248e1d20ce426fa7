"""The training side of weight-update pairs: new weights are laid out where inference workers can take them, and the
weight-update gateway is told. See ``areal.services.weight_update``."""
