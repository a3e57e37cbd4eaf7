"""Every number of seconds whose order matters, in one table.

tests/unit/test_times.py holds the order, with the reason for each pair.
"""

# Requests to etcd.
ATTEMPT_TIMEOUT = (1.0, 2.0)  # one attempt at one endpoint, at random between the two
CERTIFICATES = 0.5  # to read them, at each connection; else those of before are shown
LOGIN_TIMEOUT = 5.0  # a login costs etcd 60 ms, and many agents may come at once
PASSWORD_FILE = 2.0  # for reading it before a login; then the last one counts
CONTACT_TIMEOUT = 10.0  # for an etcd that was never seen; one that was is waited for
LEAVE_TIMEOUT = 2.0  # each request of a node that leaves: its lease ends by itself anyway
REVOKE_TIMEOUT = 2.0
PUBLISH_TIMEOUT = 2.0  # of what is only told
OPEN_TIMEOUT = 2.0  # for the first answer of a watch
REFUSED_PAUSE = 5.0  # at most, between two tries of what an administrator has to make possible
LOOK_UP = 8.0  # of a name; resolvers repeat a question after 5 s
LEASE_TTL = 5  # the default; etcd may grant more

# An etcd of one's own.
EMBEDDED_START = 15.0  # until it serves
EMBEDDED_STOP = 3.0  # from SIGTERM to SIGKILL
EMBEDDED_QUIET = 60.0  # one that lived shorter is started again more and more slowly
EMBEDDED_SLOWEST = 30.0

# Lines between agents.
PROOF = 0.3  # from a link's end until it is known whether its agent is gone
OWN_LOOK_UP = 1.0  # of the name given by --advertise, while the others wait for this node
HELLO = 2.0  # for a caller to say who it is
CALL = 5.0  # for a call to be answered
CALL_AGAIN = 60.0  # at most, until who could not be called is called again

# A worker and its agent.
CURRENT_TIMEOUT = 5.0  # the agent's question to etcd whether a generation is current
ANSWER_TIMEOUT = 10.0  # a worker's wait for any answer of its agent
SYNC_PATIENCE = 8.0  # a rank's wait for the others' word at which step all stop
COPY_PATIENCE = 10.0  # at least, for another local rank to copy what this one needs, too
GOODBYE = 3.0  # for a parked worker to end by itself

# The end of workers.
SIGTERM_TWICE = 1.0  # Slurm sends it to a step and to its job, one after the other: that is once
# From SIGTERM, or the word to park, to SIGKILL.
GRACE_FAILURE = 3.0  # what there is to save may be spoilt, and all nodes wait for the last worker
GRACE_PARK = 20.0  # to park after a failure: NCCL's communicators are aborted; the default
GRACE_CHANGE = 30.0  # torchrun's; a script that doesn't handle SIGTERM ends at once anyway
GRACE_LEAVE = 30.0  # the default of --leave-deadline
PARK_LATE = 5.0  # then a worker that is to park says where it stands
NCCL_LOOK = 1.0  # between two looks whether NCCL has met an error
LEFTOVERS = 3.0  # for what workers left, and has no accelerator, to end by itself
KILLED = 1.0  # after SIGKILL, by when nothing is left, but for what is stuck in the kernel
NOTHING_FREE = 30.0  # for a process, a thread or a port, of which all are in use
ANSWER = 5.0  # of a child of the agent's own: one that lives and does nothing is replaced
IMPORTED = 60.0  # for the fork server's imports; then workers import for themselves
CHILD_GONE = 1.0  # an agent that ends waits so long for each child of its own
AGENT_GONE = 30.0  # for the agent beside torchrun, whose workers have ended, to end
STUCK = 10.0  # after SIGKILL it is told that processes are still there
ERROR_FILE = 1.0  # for a failed worker's error file, which may be on a disk that stands still
UNKILLABLE = 30.0  # and then this node leaves the job; the default

# A worker that hangs.
HANG_AT_LEAST = 60.0  # in one step, without --hang-timeout
HANG_LEARNT = 1800.0  # at most, by what was once slow
HANG_ASK = 0.5  # for opening the pipes to ask by, which may be on a disk that stands still
HANG_STACKS = 3.5  # at most, for the stacks that a worker writes to reach its agent
HANG_EVIDENCE = 4.0  # for the files about it, which may be on a disk that stands still
HANG_ANSWER = 2.0  # for all agents to say where their workers are, beyond these two
HANG_ALONE = 10.0  # for the coordinator to ask; then a node tells of its own workers only

# Who is waited for in a formation: from the time when the round is joinable.
ACK_PATIENCE = 3.0  # a node that has nothing to stop; --settle if that is longer
# Beyond the grace and UNKILLABLE, by when a survivor has stopped or left; and beyond
# --leave-deadline, by when a node that leaves is gone.
STOP_PATIENCE = 10.0

# The start of a world, and who waits for one.
LONGEST_BACKOFF = 60.0  # after worlds whose workers fail at once
SCALE_PATIENCE = 90.0  # of who has scaled a job, beyond the limits' patience

# A machine that goes.

HEALTH_TIMEOUT = 60.0  # for the command of --health-check
HEALTH_INTERVAL = 60  # between two of them

# Somebody who looks at a job.
LOOK_PERIOD = 2.0  # between two paces of a node
LOOK_TTL = 10  # so long nodes go on to tell their paces when who has looked was killed

# Who takes a lost coordinator's place: by group rank, after each of these four times as many.
LEAD_TURN = 0.25  # an etcd under load has written the first one's Txn, and told the others

# Whose failure was it?
# A failure that a peer seems to have caused is kept back for so long: its cause may be known later,
# because a dying process closes its connections before it is gone.
HOLD = 2.0
PARKED_PATIENCE = 2.0  # beyond a lease's TTL: by then a lost node is known to be lost

# The guardian, once the agent is gone, or stands still.
GUARD_GONE = 1.0  # for what was killed to be gone; a driver may hold a process for long
GUARD_REVOKE = 10.0  # the lease ends by itself about then
GUARD_LATER = 0.5  # than an agent that is cut off, it kills what must be gone with the lease
GUARD_LIFE = 60  # whatever happens
GUARDIAN_QUIET = 10.0  # one that lived shorter is replaced more and more slowly
GUARDIAN_SLOWEST = 60.0
