package sqlitelock

// RemoteTypes are the file systems that are refused.
var RemoteTypes = remoteTypes
