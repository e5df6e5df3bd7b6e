"""The daemon, one per node: samples the machine, receives the jobs' records, and serves both to Prometheus.

In come the kernel's files, the driver's answers and frames of jobs; out go metrics, pages, recordings, and signals for
the jobs.  Start with `daemon`, which builds all parts; `service` is the process around it.

    collectors/, gpu/   one module for each source of numbers
    sampling/           the tick, and glances between ticks within the CPU budget
    worker_pool         the threads that collectors and GPUs share while their calls return
    jobs/               what is known now of the host and the jobs, bounded; what a step costs in energy; who is late
    ingest/             the hooks' socket: frames, who may send what, commands to jobs
    export/             metrics for Prometheus and OTLP
    http/               the port: pages, status document, event stream, TLS and passwords
    recorder/           the flight recorder
    service, reload, systemd, activation    signals, changed files, readiness, a socket that systemd opened
    catalog_sample, histogram               what parts of the daemon make their samples with; counts of durations
    watched_threads, fault_containment      every thread goes on; a bug costs one job, collector or step of a tick
    fair_share, heap_trimming               bounds that users share; memory that does not grow
    wakeable_selector                       how the socket server, the web server and the event stream wait

It sets nothing on any device, starts no program, and a scrape never waits for a driver.
"""
