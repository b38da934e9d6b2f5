"""The commands: `hiercommrun` starts a job, `hiercomm` looks at one."""
