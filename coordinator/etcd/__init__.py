"""The registry in etcd, for fleets that must survive the coordinator's board: several coordinators share it."""
