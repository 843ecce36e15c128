/**
 * Shapes of what the coordinator answers: the API's, as types. Times are Unix seconds, `null` is
 * "not known".
 *
 * @typedef {"read" | "operate"} Role
 *
 * @typedef {object} Session
 * @property {Role} role
 * @property {string} name of the token's holder
 * @property {string[]} runs
 *
 * @typedef {object} LevelReport
 * @property {number} level
 * @property {number | null} parameters
 * @property {number | null} accuracy
 * @property {number | null} devices
 *
 * @typedef {object} Totals
 * @property {number | null} seconds
 * @property {number | null} joules
 * @property {number | null} bytes_up
 * @property {number | null} bytes_down
 * @property {number | null} trained
 * @property {number | null} skipped
 * @property {number | null} late
 * @property {number | null} rejected
 *
 * @typedef {object} Status
 * @property {string} task
 * @property {string} run
 * @property {string} folder
 * @property {string} state
 * @property {string | null} phase
 * @property {boolean} asynchronous
 * @property {number} round
 * @property {number | null} rounds
 * @property {number} committed
 * @property {string | null} waits_for
 * @property {number | null} deadline_s
 * @property {number | null} started
 * @property {number} time
 * @property {string} version
 * @property {boolean | null} broker_connected
 * @property {{known: number, present: number, training: number, quarantined: number, paused: number}} devices
 * @property {Record<string, number>} levels
 * @property {Record<string, number>} skips
 * @property {number | null} accuracy
 * @property {number | null} deploy
 * @property {{round: number, accuracy: number, level: number | null} | null} best
 * @property {LevelReport[]} level_reports
 * @property {Totals} totals
 * @property {Record<string, unknown>} settings
 * @property {{by: string, time: number} | null} paused
 * @property {"round" | "now" | null} stopping
 * @property {number} sequence
 *
 * @typedef {object} DeviceRow
 * @property {string} device
 * @property {boolean} present
 * @property {string} state
 * @property {number | null} level
 * @property {string | null} reason
 * @property {string | null} code
 * @property {number | null} round
 * @property {number | null} last_seen
 * @property {string | null} last_error
 * @property {number | null} last_error_time
 * @property {number | null} battery
 * @property {boolean | null} charging
 * @property {number | null} temperature_c
 * @property {number | null} memory_free_mb
 * @property {number | null} memory_mb
 * @property {number | null} bytes_up
 * @property {number | null} bytes_down
 * @property {number | null} train_s
 * @property {number | null} joules
 * @property {number | null} energy_today_j
 * @property {number | null} energy_budget_j
 * @property {number | null} trained
 * @property {number | null} skipped
 * @property {number | null} late
 * @property {number | null} rejected
 * @property {number | null} contribution
 * @property {number | null} staleness
 * @property {number | null} samples
 * @property {{round: number | null, reason: string} | null} quarantined
 * @property {Record<string, string>} labels
 * @property {string | null} profile
 * @property {string | null} version
 * @property {number} sequence
 *
 * @typedef {object} DeviceRound
 * @property {number} round
 * @property {number | null} level
 * @property {string | null} reason
 * @property {string | null} code
 * @property {string | null} outcome
 * @property {number | null} loss
 * @property {number | null} bytes_up
 * @property {number | null} bytes_down
 * @property {number | null} train_s
 * @property {number | null} joules
 *
 * @typedef {DeviceRow & {rounds: DeviceRound[]}} Device
 *
 * @typedef {object} RoundRow
 * @property {number} round
 * @property {number | null} time
 * @property {number | null} accuracy
 * @property {{level: number, accuracy: number | null}[]} levels
 * @property {number | null} seconds
 * @property {number | null} joules
 * @property {number | null} bytes_up
 * @property {number | null} bytes_down
 * @property {number | null} trained
 * @property {number | null} skipped
 * @property {number | null} late
 * @property {number | null} rejected
 * @property {number | null} coverage_min
 * @property {number | null} oldest_memory
 * @property {string | null} digest
 * @property {string | null} event
 *
 * @typedef {object} Block
 * @property {number | string} id
 * @property {number} parameters
 * @property {[string | number, number][]} signature
 * @property {number | null} covered
 * @property {number | null} last_covered
 * @property {number | null} age
 * @property {number | null} memory_age
 * @property {number | null} movement
 *
 * @typedef {object} Tensor
 * @property {string} name
 * @property {number[]} shape
 * @property {number} parameters
 * @property {Block[]} blocks
 *
 * @typedef {object} BlockMap
 * @property {number} round
 * @property {{name: string, groups: unknown[]}[]} axes
 * @property {Tensor[]} tensors
 *
 * @typedef {object} Strip
 * @property {number[]} rounds
 * @property {Record<string, string>} devices
 * @property {Record<string, string>} legend
 *
 * @typedef {object} AuditRow
 * @property {number} time
 * @property {string} by
 * @property {string} what
 * @property {unknown} details
 */
export {};
