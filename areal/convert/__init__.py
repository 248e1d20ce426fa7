"""Configurations of other frameworks as TrainJobs of this one. Pure: tables of keys, and what they mean here."""
