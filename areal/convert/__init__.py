"""Convert configurations of other frameworks to TrainJobs. Pure: tables of keys with their meaning in areal."""
